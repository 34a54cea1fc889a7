"""Programs for several sizes: the integers in them are those of the step at each size."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.capture.twins import run_twins
from tilework.capture import capture


def halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2)  # of which the first is the larger, for odd sizes
    return first.sum() - second.sum()


@pytest.mark.parametrize(
    ("step", "sizes", "records"),
    [
        (lambda x: (x.sum().item() * len(x), {"rows": [len(x), 2 * len(x)]}), (4, 6, 8, 5, 9), 1),
        (lambda x: min(len(x), 8), (4, 6, 10, 12), 1),
        (halves, (4, 6, 8, 10, 5, 7, 9, 11), 1),
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


def test_a_recurrent_layer_under_no_grad_keeps_its_last_bits() -> None:
    """oneDNN computes it in another way where gradients are enabled."""
    lstm, x = nn.LSTM(3, 4), torch.ones(5, 2, 3)
    state = {"h": torch.zeros(1, 2, 4), "c": torch.zeros(1, 2, 4)}
    own = dict(state)

    def step(x: Tensor, state: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            y, (state["h"], state["c"]) = lstm(x, (state["h"], state["c"]))
        return y  # type: ignore[no-any-return]

    program = capture(lambda x: step(x, own))
    for _ in range(4):
        assert torch.equal(program(x), step(x, state))
    assert torch.equal(own["c"], state["c"])
