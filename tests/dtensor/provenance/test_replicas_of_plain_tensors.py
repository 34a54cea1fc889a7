"""Plain parameters that all ranks are to have alike, compared when asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.tables import each
from tilework.dtensor import init_device_mesh, verify
from tilework.errors import CollectiveMismatchError
from tilework.parallel import (
    ColwiseParallel,
    DistributedDataParallel,
    RowwiseParallel,
    parallelize_module,
)
from tilework.testing import run_ranks


def _parallel(model: Any) -> Any:
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


WAYS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda model: model,
    "data parallel": DistributedDataParallel,
    "tensor parallel": _parallel,
}


@each("way", WAYS)
def test_verify_names_a_plain_parameter_that_one_rank_has_changed(way: str) -> None:
    def program(rank: int) -> str:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4))
        wrapped = WAYS[way](model)
        verify(wrapped)
        if rank == 1:
            model[2].bias.data[3] = 7.0
        with pytest.raises(CollectiveMismatchError) as caught:
            verify(wrapped)
        return str(caught.value)

    for text in run_ranks(2, program):
        assert text.startswith("'2.bias' (float32 [4]) is not the same on all ranks")
        assert "0.0 on rank 0 and 7.0 on rank 1" in text


#: Elements of rank 0 and of rank 1, in the same place.
UNEQUAL = [(0.0, 1.0), (3.0, torch.inf), (-torch.inf, torch.inf), (torch.nan, 0.0)]


def test_every_element_is_compared_also_beside_infinite_ones() -> None:
    def program(rank: int) -> list[str]:
        texts = []
        for pair in UNEQUAL:
            table = nn.Embedding(1000, 2)
            nn.init.ones_(table.weight)
            with torch.no_grad():
                table.weight[0, 0], table.weight[789, 1] = -torch.inf, pair[rank]
            with pytest.raises(CollectiveMismatchError) as caught:
                verify(table)
            texts.append(str(caught.value))
        return texts

    for texts in run_ranks(2, program):
        for (one, other), text in zip(UNEQUAL, texts, strict=True):
            assert f"an element is {one} on rank 0 and {other} on rank 1" in text


def test_differences_of_rounding_are_none() -> None:
    def program(rank: int) -> None:
        model = nn.Linear(4, 4)
        nn.init.constant_(model.weight, 1 + rank * 1e-7)
        nn.init.zeros_(model.bias)
        verify(model)

    run_ranks(2, program)


def test_models_of_other_parameters_are_told_apart() -> None:
    def program(rank: int) -> None:
        with pytest.raises(
            CollectiveMismatchError, match=r"rank 0 has 'weight' \(float32 \[1, 4\]"
        ):
            verify(nn.Linear(4, 1 + rank))
        with pytest.raises(CollectiveMismatchError, match="rank 0 has 2 tensors and rank 1 has 1"):
            verify(nn.Linear(4, 1, bias=rank == 0).requires_grad_(False))

    run_ranks(2, program)


def test_a_program_of_one_process_has_nothing_to_compare() -> None:
    verify(nn.Linear(2, 2))
