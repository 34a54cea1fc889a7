"""TorchScript: scripted functions gather DTensors, and traces refuse them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.dtensor.op_checks import noting_gatherings
from tests.rounding import assert_close
from tilework.dtensor import DTensor, distribute_tensor
from tilework.layout import Shard
from tilework.mesh import init_device_mesh
from tilework.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def _sharded(whole: Tensor) -> DTensor:
    return distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])


def doubled_sine(x: Tensor) -> Tensor:
    return x.sin() * 2 + x.sum()


_trace: Any = torch.jit.trace
TRACED: dict[str, Callable[[Any], Any]] = {
    "an example": lambda x: _trace(lambda y: y.sin(), (x,)),
    "one that is closed over": lambda x: _trace(lambda y: y * x, torch.ones(3)),
    "the part of a rank": lambda x: _trace(lambda y: y * x.sum().full_tensor(), torch.ones(3)),
}


@pytest.mark.parametrize("what", TRACED)
def test_traces_refuse_dtensors(what: str) -> None:
    def program(rank: int) -> None:
        x = _sharded(torch.ones(4, 3))
        with pytest.raises(RuntimeError, match=r"torch\.jit\.trace takes no DTensors.*full_tensor"):
            TRACED[what](x)
        assert x.sum().item() == 12  # nothing is left of it

    run_ranks(2, program)


def test_plain_functions_are_traced_and_scripted_as_before() -> None:
    x = torch.randn(3)
    assert_close(_trace(doubled_sine, x)(x), doubled_sine(x))
    assert_close(torch.jit.script(doubled_sine)(x), doubled_sine(x))


@pytest.mark.parametrize("what", ["function", "module"])
def test_scripted_ones_run_on_gathered_tensors(what: str) -> None:
    whole = torch.randn(4, 3)
    scripted: Any = torch.jit.script(doubled_sine if what == "function" else nn.Linear(3, 2))

    def program(rank: int) -> None:
        x = _sharded(whole).requires_grad_()
        result = scripted(x)
        assert isinstance(result, DTensor)
        assert_close(result.full_tensor(), scripted(whole))

    with noting_gatherings():
        run_ranks(2, program)
