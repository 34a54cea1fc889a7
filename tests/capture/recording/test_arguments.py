"""Arguments and results that are no tensors: they keep their classes, and are compared by value."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from tilework.capture import capture


def test_sizes_are_sizes_among_arguments_and_results() -> None:
    def step(x: Tensor, size: torch.Size) -> Any:
        return x * size.numel(), [x.shape, x.size(), x.stride()]

    program = capture(step)
    for length in (2, 2, 2, 3, 3, 2):
        x = torch.ones(length, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found, sizes = program(x, x.shape)
        assert torch.equal(found, step(x, x.shape)[0])
        assert [(type(x), x) for x in sizes] == [(type(x), x) for x in step(x, x.shape)[1]]
    assert len(program._all()) == 2


def test_equal_devices_share_a_record() -> None:
    program = capture(lambda x, device: x + torch.ones(2, device=device))
    for _ in range(4):
        assert program(torch.ones(2), torch.device("cpu")).tolist() == [2.0, 2.0]
    assert len(program._all()) == 1
