"""Programs for several sizes: the integers in them are those of the step at each size."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.capture.twins import run_twins


def halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2)  # of which the first is the larger, for odd sizes
    return first.sum() - second.sum()


@pytest.mark.parametrize(
    ("step", "sizes", "records"),
    [
        (lambda x: (x.sum().item() * len(x), {"rows": [len(x), 2 * len(x)]}), (4, 6, 8, 5, 9), 1),
        (lambda x: min(len(x), 8), (4, 6, 10, 12), 3),
        (halves, (4, 6, 8, 10, 5, 7, 9, 11), 2),
    ],
)
def test_integers_that_depend_on_the_size_are_those_of_the_step(
    step: Any, sizes: tuple[int, ...], records: int
) -> None:
    batches = [(torch.randn(size, 2),) for size in (4, *sizes)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = run_twins(lambda: (step, dict), batches)
    assert len(program.records) == records
