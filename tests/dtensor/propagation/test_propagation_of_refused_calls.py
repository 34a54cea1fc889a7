"""Calls that torch refuses for their sizes, dims or dtypes: no rank communicates to hear of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tilework.dtensor import (
    Partial,
    Placement,
    Shard,
    distribute_tensor,
    explain,
    init_device_mesh,
)
from tilework.testing import run_ranks

X = torch.arange(12.0).view(4, 3)
CALLS: dict[str, Callable[[Any], Any]] = {
    "view": lambda x: x.view(7),
    "view of two unknown sizes": lambda x: x.view(-1, -1),
    "reshape": lambda x: x.reshape(-1, 5),
    "unflatten": lambda x: x.unflatten(0, (3, 3)),
    "permute": lambda x: x.permute(0, 0),
    "transpose": lambda x: x.transpose(0, 5),
    "expand": lambda x: x.expand(5, 3),
    "sum": lambda x: x.sum(4),
    "cumsum": lambda x: x.cumsum(4),
    "split": lambda x: x.split([1, 1]),
    "add": lambda x: x + torch.ones(5),
    "add_": lambda x: x.add_(torch.ones(7)),
    "copy_": lambda x: x.copy_(torch.ones(7)),
    "matmul": lambda x: x @ x,
    "cat": lambda x: torch.cat([x, torch.ones(2, 2)]),
    "where": lambda x: torch.where(torch.ones(5, dtype=torch.bool), x, x),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("placement", [Shard(0), Partial()])
def test_nothing_is_gathered_to_refuse_a_call(name: str, placement: Placement) -> None:
    call = CALLS[name]
    with pytest.raises((RuntimeError, IndexError)) as expected:
        call(X.clone())

    def program(rank: int) -> None:
        x = distribute_tensor(X, init_device_mesh("cpu", (2,)), [placement])
        with explain() as log, pytest.raises(type(expected.value)):
            call(x)
        assert not log.events
        assert torch.equal(x.full_tensor(), X)

    run_ranks(2, program)


def test_the_words_are_torchs() -> None:
    def program(rank: int) -> None:
        x = distribute_tensor(X, init_device_mesh("cpu", (2,)), [Shard(0)])
        with pytest.raises(RuntimeError, match="must match the size of tensor b"):
            x.add_(torch.ones(5))
        with pytest.raises(RuntimeError, match=r"shape '\[7\]' is invalid for input of size 12"):
            x.view(7)

    run_ranks(2, program)
