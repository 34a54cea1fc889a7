"""Replicas that differ are told by name; equal ones are made where that is asked for."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.parallel.data_parallel.models import raised
from tilework.parallel import DistributedDataParallel
from tilework.testing import run_ranks


def convolution(layout: torch.memory_format) -> nn.Module:
    module: Any = nn.Conv2d(3, 2, 2)
    laid_out: nn.Module = module.to(memory_format=layout)
    return laid_out


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (lambda rank: nn.Linear(2, 2 + rank), r"weight is float32 \[2, 2\] on rank 0 and float32 "),
        (
            lambda rank: nn.Linear(2, 2).to(torch.double if rank else torch.float),
            r"weight is float32 \[2, 2\] on rank 0 and float64 \[2, 2\] on rank 1",
        ),
        (
            lambda rank: nn.Sequential(*[nn.Linear(2, 2)] * (1 + rank), nn.Linear(2, 1)),
            r"where rank 0 has 1\.weight, rank 1 has 2\.weight",
        ),
        (lambda rank: nn.Linear(2, 2, bias=rank == 0), r"rank 1 lacks bias, which rank 0 has"),
        (
            lambda rank: convolution(torch.channels_last if rank else torch.contiguous_format),
            r"on rank 0 and float32 \[2, 3, 2, 2\] of strides \(12, 1, 6, 3\) on rank 1",
        ),
    ],
)
def test_replicas_that_differ(module: Callable[[int], nn.Module], message: str) -> None:
    for text in raised(2, lambda rank: DistributedDataParallel(module(rank))):
        assert text.startswith("ValueError: DistributedDataParallel needs the same parameters")
        assert re.search(message, text), text


def test_values_are_those_of_the_first_rank() -> None:
    def program(rank: int) -> tuple[float, float]:
        model: Any = nn.BatchNorm1d(2)
        with torch.no_grad():
            model.weight.fill_(rank + 1.0)
            model.running_mean.fill_(rank + 5.0)
        ddp: Any = DistributedDataParallel(model)
        return ddp.module.weight[0].item(), ddp.module.running_mean[0].item()

    assert run_ranks(2, program) == [(1.0, 5.0)] * 2


def test_values_that_are_not_sent_are_compared() -> None:
    def program(rank: int, same: bool) -> None:
        model: Any = nn.Linear(2, 2)
        nn.init.constant_(model.weight, 1.0 if same else float(rank))
        nn.init.zeros_(model.bias)
        DistributedDataParallel(model, init_sync=False)

    assert raised(2, lambda rank: program(rank, True)) == ["", ""]
    for text in raised(2, lambda rank: program(rank, False)):
        assert re.search(r"weight is .* elements with hash \w+ on rank 0 and", text)
