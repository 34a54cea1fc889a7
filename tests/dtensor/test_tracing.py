"""Traces refuse DTensors; scripted functions gather them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from tests.dtensor.op_checks import noting_gatherings
from tests.rounding import assert_close
from tests.tables import each
from tilework.dtensor import DTensor, distribute_module, distribute_tensor
from tilework.layout import Shard
from tilework.mesh import init_device_mesh
from tilework.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def _sharded(whole: Tensor) -> DTensor:
    return distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])


def doubled_sine(x: Tensor) -> Tensor:
    return x.sin() * 2 + x.sum()


class Closing(nn.Module):
    held: list[Tensor]

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.held = [x]

    def forward(self, y: Tensor) -> Tensor:
        return y * self.held[0]


_trace: Any = torch.jit.trace
TRACED: dict[str, Callable[[Any], Any]] = {
    "an example": lambda x: _trace(lambda y: y.sin(), (x,)),
    "one that is closed over": lambda x: _trace(lambda y: y * x, torch.ones(3)),
    "one that a module closes over": lambda x: _trace(Closing(x), torch.ones(3)),
    "a parameter": lambda x: _trace(distribute_module(nn.Linear(3, 2), x.device_mesh), x),
    "the part of a rank": lambda x: _trace(lambda y: y * x.sum().full_tensor(), torch.ones(3)),
}


@each("what", TRACED)
def test_traces_refuse_dtensors(what: str) -> None:
    def program(rank: int) -> None:
        x = _sharded(torch.ones(4, 3))
        with pytest.raises(RuntimeError, match=r"torch\.jit\.trace takes no DTensors.*full_tensor"):
            TRACED[what](x)
        assert x.sum().item() == 12  # nothing is left of it

    run_ranks(2, program)


@each("options", [{}, {"tracing_mode": "fake"}, {"pre_dispatch": True}])
def test_make_fx_refuses_dtensors(options: dict[str, Any]) -> None:
    """Their values would be constants of the graph."""

    def program(rank: int) -> None:
        x = distribute_tensor(torch.ones(4, 3), init_device_mesh("cpu", (1,)), [Shard(0)])
        for function, given in ((lambda y: y * x, torch.ones(3)), (torch.sin, x)):
            with pytest.raises(RuntimeError, match=r"make_fx takes no DTensors.*full_tensor"):
                make_fx(function, **options)(given)
        assert x.sum().item() == 12

    run_ranks(1, program)  # make_fx is for one thread


def test_plain_functions_are_traced_and_scripted_as_before() -> None:
    x = torch.randn(3)
    assert_close(_trace(doubled_sine, x)(x), doubled_sine(x))
    assert_close(make_fx(doubled_sine)(x)(x + 1), doubled_sine(x + 1))
    assert_close(torch.jit.script(doubled_sine)(x), doubled_sine(x))


def test_modules_with_dtensors_are_not_scripted() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1,))
        model = distribute_module(nn.Sequential(nn.Linear(3, 2)), mesh)
        with pytest.raises(
            RuntimeError, match=r"no modules with DTensors.* 0.weight of this Sequential"
        ):
            torch.jit.script(model)
        scripted: Any = torch.jit.script(nn.Linear(3, 2))
        with pytest.raises(TypeError, match="no scripted modules, and '0' is a ScriptModule"):
            distribute_module(nn.Sequential(scripted), mesh)

    run_ranks(1, program)


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
