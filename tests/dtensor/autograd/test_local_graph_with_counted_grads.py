"""Gradients of gradients of partial values, by each way to see one and to give one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad

from tests.dtensor.op_checks import Layout, distributed
from tests.rounding import assert_close
from tests.tables import each
from tests.user_functions import Squared
from tilework.dtensor import DTensor, Partial, Placement, Replicate, Shard, init_device_mesh
from tilework.testing import run_ranks

X = torch.tensor([[1.0, -2.0, 0.5], [3.0, 1.5, -1.0]]).double()
U = torch.tensor([[2.0, 1.0, -1.5], [0.5, -3.0, 1.0]]).double()
_squared: Callable[[Any], Any] = Squared.apply


def of_a_leaf(x: Any, u: Any) -> Any:
    (x**3).sum().backward(create_graph=True)
    with torch.no_grad():
        assert x.grad is not None  # seen without gradients first
    return x.grad * u


def added_up(x: Any, u: Any) -> Any:
    (x**3).sum().backward(create_graph=True)
    x.grad.mul_(u)
    (x**4).sum().backward(create_graph=True)
    return x.grad


def given(x: Any, u: Any) -> Any:
    x.grad = u**2
    (x**4).sum().backward(create_graph=True)
    return x.grad


def cleared(x: Any, u: Any) -> Any:
    (x**3).sum().backward(create_graph=True)
    x.grad.detach_().zero_()
    (x**4 * u).sum().backward(create_graph=True)
    return x.grad


def retained(x: Any, u: Any) -> Any:
    y = x * 1
    y.retain_grad()
    (y**3 * u).sum().backward(create_graph=True)
    return y.grad


def seen_by_a_hook(x: Any, u: Any) -> Any:
    seen: list[Any] = []
    y = x * 1
    y.register_hook(seen.append)
    grad((y**3 * u).sum(), x, create_graph=True)
    return seen[0]


def changed_by_a_hook(x: Any, u: Any) -> Any:
    y = x * 1
    y.register_hook(lambda g: g * g * u)
    return grad((y**3).sum(), x, create_graph=True)[0]


def changed_by_a_hook_of_a_leaf(x: Any, u: Any) -> Any:
    x.register_hook(lambda g: g * g * u)
    return grad((x**3).sum(), x, create_graph=True)[0]


def written_by_a_hook(x: Any, u: Any) -> Any:
    y = x * 1

    def hook(g: Any) -> None:
        g.mul_(u)

    y.register_hook(hook)
    return grad((y**3).sum(), x, create_graph=True)[0]


def after_accumulating(x: Any, u: Any) -> Any:
    def hook(x: Any) -> None:
        x.grad = x.grad * x.grad * u

    x.register_post_accumulate_grad_hook(hook)
    (x**3).sum().backward(create_graph=True)
    return x.grad


def of_a_function(x: Any, u: Any) -> Any:
    return grad((_squared(x * 1) ** 2 * u).sum(), x, create_graph=True)[0]


def _tripled(module: Any, into: Any, out: Any) -> Any:
    return (into[0] * 3,)


def of_a_module_with_a_hook(x: Any, u: Any) -> Any:
    module = nn.Identity()
    module.register_full_backward_hook(_tripled)
    return grad((module(x * 1) ** 3 * u).sum(), x, create_graph=True)[0]


WAYS = [
    *(of_a_leaf, added_up, given, cleared, retained, seen_by_a_hook),
    *(changed_by_a_hook, changed_by_a_hook_of_a_leaf, written_by_a_hook, after_accumulating),
    *(of_a_function, of_a_module_with_a_hook),
]
PARTIAL, WHOLE = Partial(), Replicate()
LAYOUTS: list[tuple[Placement, ...]] = [
    *((Partial(op),) for op in ("sum", "avg", "max", "min")),
    *((PARTIAL, Shard(0)), (WHOLE, PARTIAL), (PARTIAL, PARTIAL)),
]


def seen(way: Callable[[Any, Any], Any], x: Any, u: Any) -> list[Tensor]:
    first = way(x, u)
    seconds = grad((first * first).sum(), [x, u], allow_unused=True)
    return [
        each.full_tensor().detach() if isinstance(each, DTensor) else each.detach()
        for each in (first, *seconds)
        if each is not None
    ]


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
@each("way", WAYS)
@each("shape", [(2,), (3,), (2, 2)])
def test_they_are_those_of_plain_tensors(
    way: Callable[[Any, Any], Any], shape: tuple[int, ...]
) -> None:
    expected = seen(way, X.clone().requires_grad_(), U.clone().requires_grad_())

    def program(rank: int) -> None:
        for layout in LAYOUTS:
            if len(layout) != len(shape):
                continue
            if way is written_by_a_hook and layout[0] not in (PARTIAL, WHOLE):
                continue  # a view that a Function returned, which torch forbids writes to
            mesh = init_device_mesh("cpu", shape)
            x = distributed(X.clone().requires_grad_(), mesh, Layout(layout))
            u = distributed(U.clone().requires_grad_(), mesh, Layout((WHOLE,) * len(layout)))
            for got, want in zip(seen(way, x, u), expected, strict=True):
                assert_close(got, want, msg=f"{layout}: ".__add__)

    run_ranks(math.prod(shape), program)
