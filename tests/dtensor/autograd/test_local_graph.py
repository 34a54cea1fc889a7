"""A user's own autograd.Function beside operators in place: both graphs are one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.fuzz.programs import compare
from tests.rounding import assert_close
from tests.tables import each, pairs
from tests.user_functions import Squared
from tilework.dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from tilework.testing import run_ranks

_GIVEN = "v0 = leaf('v0', (4,), 1, 'R')\nv1 = data((3, 4), 2, 'S1')\n"


@each(
    "program",
    [
        "v1 = recomputed(lambda a: a.sin(), v0, reentrant=True)\nv1.masked_fill_(v1 > 0.3, 2.0)",
        "v1 = own(v0)\nv1.mul_(3.0)",
        "v1 = own(v0)\nv1[0].mul_(3.0)",
        "v1 = own(own(v0))\ntorch._foreach_mul_([v1], 3.0)",
        "v1 = own(v0)\nv1.detach_()",
    ],
)
@each("lies", ["S0", "P"])
def test_a_result_that_was_written_to_is_taken_as_it_is_now(program: str, lies: str) -> None:
    compare(f"v0 = leaf('v0', (3, 4), 1, '{lies}')\n{program}\nv2 = own(own(v1))\nv3 = v2 * v1")


@each(
    "write",
    [
        "v1[0] = v0",
        "v1[0].mul_(v0)",
        "v1[:, 2:2].add_(v0[2:2])",
        "v1.t()[1:].mul_(v0[:1])",
        "torch._foreach_mul_([v1[0]], [v0])",
        "v1[:0].addcmul_(v0, v0)",
    ],
)
@each("call", ["own(v1)", "recomputed(lambda a: a.sin(), v1, reentrant=True)"])
def test_a_base_that_a_view_has_brought_into_the_graph(write: str, call: str) -> None:
    compare(f"{_GIVEN}{write}\nv2 = {call}")


class _Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (y,) = ctx.saved_tensors
        return grad * y


def _step(weight: Any) -> None:
    weight.grad = torch.ones_like(weight)
    torch.optim.SGD([weight], 0.1).step()


class _Clipped(torch.autograd.Function):
    """The tensor; its gradient is clipped, and not linear in that of the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad.clamp(-1, 1)


_square: Callable[[Any], Any] = Squared.apply
_clipped: Callable[[Any], Any] = _Clipped.apply
_exp: Callable[[Any], Any] = _Exp.apply


@each("dim", [0, 1])
def test_an_optimizer_must_not_step_on_what_a_function_has_saved(dim: int) -> None:
    def program(rank: int) -> None:
        x: Any = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(dim)])
        z = _square(x.requires_grad_())
        _step(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()

    run_ranks(2, program)


@each("placement", ["R", "S0", "S1", "P", "PA", "PM"])
@each("made", ["v0 * 1", "leaf('v1', (4, 4), 2, 'S0')"])
def test_what_is_computed_of_data_of_inference_mode_alone_is_in_no_graph(
    placement: str, made: str
) -> None:
    compare(
        f"v0 = leaf('v0', (4, 4), 1, '{placement}')\nv1 = {made}\n"
        "with torch.inference_mode(): v1.data = v1.data * 2\n"
        "v2 = torch.maximum(v1, v1)\nv3 = v1 @ v1.mT\nv4 = v1 + v0\nv5 = v1.nansum(0)\n"
        "v6 = v1.cumsum(0)\nv7 = functional.gelu(v1)\nv8 = v1 * 2\nv9 = v1.softmax(1)\n"
        "v10 = v1.std(1)\nv11 = functional.layer_norm(v1, (4,))\nv12 = v1.log_softmax(0)\n"
        "v13 = v1[[1, 0]]\nv14 = functional.pad(v1, (1, 1))"  # which torch does record
    )


def test_a_hook_in_inference_mode() -> None:
    compare(
        "v0 = leaf('v0', (4,), 5, 'S0')\nv1 = own(own(v0))\n"
        "with torch.inference_mode(): watch(v1, 'v1')"
    )


@each("first", ["own(v0)", "recomputed(lambda a: a.sin(), v0, reentrant=True)"])
@each("reentrant", [False, True])
def test_a_result_goes_into_a_checkpoint(first: str, reentrant: bool) -> None:
    compare(
        f"v0 = leaf('v0', (3, 4), 1, 'S0')\nv1 = {first}\n"
        f"v2 = recomputed(lambda a: own(a * 2) + a, v1, reentrant={reentrant})\n"
        f"v3 = own(v1) * v2"
    )


_USES: dict[str, Callable[[Any], Any]] = {
    "a function first": lambda y: _square(y) * 0.8 + y * 0.9,
    "an operator first": lambda y: y * 0.9 + _square(y) * 0.8,
    "two functions": lambda y: _square(y) * 0.8 + _exp(y) * 0.3,
    "a checkpoint": lambda y: (
        checkpoint(lambda y: _square(y) + y, y, use_reentrant=False) + _exp(y)
    ),
}


@each("use", _USES)
def test_a_result_that_is_used_twice_has_one_backward(use: str) -> None:
    values = torch.linspace(-1, 1, 12).view(3, 4)

    def gradient(x: Any) -> Any:
        _USES[use](_clipped(x.requires_grad_())).pow(2).sum().backward()
        return x.grad

    expected = gradient(values.clone())

    def program(rank: int) -> None:
        x = distribute_tensor(values, init_device_mesh("cpu", (2,)), [Shard(0)])
        assert_close(gradient(x).full_tensor(), expected)

    run_ranks(2, program)


class _Viewed(torch.autograd.Function):
    """A view of the tensor, whose gradient is three times that of the view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, view: Callable[[Any], Any]) -> Any:
        ctx.like, ctx.view = x.detach(), view
        return view(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        whole = torch.zeros_like(ctx.like)
        ctx.view(whole).copy_(grad * 3)
        return whole, None


def _head(x: Any) -> Any:
    module = torch.nn.Identity()
    module.register_forward_hook(lambda module, args, out: out[0])
    module.register_full_backward_hook(lambda module, into, out: None)
    return module(x)


_viewed: Callable[..., Any] = _Viewed.apply
_RESULTS: dict[str, Callable[[Any], Any]] = {
    "flat": lambda x: _viewed(x, lambda x: x.view(-1)),
    "a row": lambda x: _viewed(x, lambda x: x[1]),
    "a part": lambda x: _viewed(x, lambda x: x[1:3]),
    "of a module with a hook": _head,
    "of a checkpoint": lambda x: checkpoint(lambda x: x.sin()[0], x, use_reentrant=True),
}


_TWICE: dict[str, Callable[[Any], Any]] = {
    "by an operator": lambda y: y * y,
    "by a function": lambda y: _square(y) * y + y,
    "by a sum": lambda y: y + y.sum(),
}


@pairs(result=_RESULTS, use=_TWICE, shape=[(2,), (3,), (2, 2)])
def test_a_result_that_is_a_view_keeps_its_gradient(
    result: str, use: str, shape: tuple[int, ...]
) -> None:
    values = torch.linspace(-1, 1, 12).double().view(4, 3)

    def gradient(x: Any) -> Any:
        _TWICE[use](_RESULTS[result](x.requires_grad_() * 1)).sum().backward()
        return x.grad

    expected = gradient(values.clone())

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", shape)
        for placement in (Shard(0), Shard(1)):
            x = distribute_tensor(values, mesh, [placement] * len(shape))
            assert_close(gradient(x).full_tensor(), expected)

    run_ranks(math.prod(shape), program)


class _Doubled(torch.autograd.Function):
    """Doubles in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def test_a_function_that_writes_to_what_was_computed_is_told_what_to_do() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x: Any = distribute_tensor(torch.ones(4), mesh, [Shard(0)]).requires_grad_()
        doubled: Callable[[Any], Any] = _Doubled.apply
        with pytest.raises(RuntimeError, match=r"_Doubled calls mark_dirty.* return a new tensor"):
            doubled(x * 1)
        with pytest.raises(RuntimeError, match=r"^a leaf Variable that requires grad"):
            doubled(x)  # as in torch
        doubled((x * 3).to_local()).sum().backward()
        assert x.grad.full_tensor().tolist() == [6.0] * 4

    run_ranks(2, program)


@each("call", ["own(v0)", "own(v0) * v0", "recomputed(lambda a: a.sin(), v0, reentrant=True)"])
@each("lies", ["R", "S0", "P"])
def test_a_leaf_that_is_frozen_after_a_function_took_it(call: str, lies: str) -> None:
    compare(f"v0 = leaf('v0', (4, 6), 10, '{lies}')\nv1 = {call}\nv0.requires_grad_(False)")


def test_a_function_takes_what_an_operator_without_a_derivative_made() -> None:
    compare("v0 = leaf('v0', (2, 3), 9, 'S0')\nv1 = v0.heaviside(v0)\nv2 = own(v1)")


@pairs(
    call=["own(v2)", "recomputed(lambda a: a.sin(), v2, reentrant=True)"],
    write=["v1[0, -2] *= -1.5", "v1[1:].copy_(v1[:1])", "v1.mul_(2.0)", "v3.add_(1.0)"],
    lies=["R", "S0", "S1", "P"],
)
def test_a_view_that_a_function_took_and_a_write_to_another(
    call: str, write: str, lies: str
) -> None:
    compare(
        f"v0 = leaf('v0', (2, 3, 4), 1, '{lies}')\nv1 = v0 * 2\nv2 = v1[:1].unsqueeze(1)\n"
        f"v3 = v1.movedim(0, 0)\nv4 = {call}\n{write}\nv5 = v4 * v1"
    )


@pairs(
    take=["v2 = own(v1)", "v2 = own(v1)\nv3 = own(v2) * v1"],
    write=["v0.copy_(v9)", "v0[1:].mul_(v9[1:])", "v0.mul_(v9)"],
    lies=["R", "S0", "S1", "P"],
    mesh=[(1,), (2,)],
)
def test_a_function_takes_a_view_whose_base_has_entered_the_graph(
    take: str, write: str, lies: str, mesh: tuple[int, ...]
) -> None:
    compare(
        f"v9 = leaf('v9', (3, 2), 1, 'S0')\nv0 = data((3, 2), 2, '{lies}')\nv1 = v0[1:3:2]\n"
        f"{write}\n{take}",
        mesh,
    )


class _Crossed(torch.autograd.Function):
    """Three results, the gradient of whose inputs has products of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        ctx.calls = []
        return x * 2, y * 3, x + y

    @staticmethod
    def backward(ctx: Any, a: Any, b: Any, c: Any) -> Any:
        x, y = ctx.saved_tensors
        return a * c * y + b, b * c + x * a


_crossed: Callable[[Any, Any], Any] = _Crossed.apply


def _without_one(x: Any, y: Any) -> None:
    _, b, c = _crossed(x * 1, y)
    (b * c).sum().backward()


def _one_by_one(x: Any, y: Any) -> None:
    a, b, c = _crossed(x, y)
    a.sum().backward(retain_graph=True)
    (b.mul_(2) * c).sum().backward()


def _twice(x: Any, y: Any) -> None:
    a, b, c = _crossed(x, y)
    grads = torch.autograd.grad((a * b * c).sum(), [x, y], create_graph=True)
    (grads[0] * grads[1]).sum().backward()  # type: ignore[no-untyped-call]


def _with_hooks(x: Any, y: Any) -> None:
    a, b, c = _crossed(x, y)
    a.register_hook(lambda grad: grad * 2)
    (a + b * c).sum().backward()


@each("program", [_without_one, _one_by_one, _twice, _with_hooks])
@each("dim", [0, 1, None])
def test_the_results_of_a_function_are_passed_back_at_once(
    program: Callable[[Any, Any], None], dim: int | None
) -> None:
    plain = [torch.randn(3, 4, dtype=torch.float64).requires_grad_() for _ in range(2)]
    program(*plain)

    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        lies = [Replicate() if dim is None else Shard(dim)]
        tensors: list[Any] = [
            distribute_tensor(x.detach(), mesh, lies).requires_grad_() for x in plain
        ]
        program(*tensors)
        for tensor, x in zip(tensors, plain, strict=True):
            assert_close(tensor.grad.full_tensor(), x.grad)

    run_ranks(2, on_rank)


@pairs(
    write=["v1.sub_(2.0)", "v1[0].zero_()", "v1.view(-1)[1:].mul_(2.0)"],
    view=["v1[:1]", "v1.mT", "v1.unfold(1, 2, 2)", "v1.detach()"],
    lies=["R", "S0", "S1", "P"],
)
def test_what_a_checkpoint_took_must_not_be_written_to_by_another_view(
    write: str, view: str, lies: str
) -> None:
    compare(
        f"v0 = leaf('v0', (2, 2, 2), 1, '{lies}')\nv1 = v0 * 1\nv2 = {view}\n"
        f"v3 = recomputed(lambda a: (a * 2).sin() + a, v2, reentrant=False)\n"
        f"with torch.no_grad(): {write}"
    )


def test_a_graph_that_was_not_kept_is_passed_once_if_a_function_saved_something() -> None:
    def program(rank: int) -> None:
        x: Any = distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])
        x.requires_grad_()
        loss = _square(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
        loss = _clipped(x).sum()  # which saves nothing
        loss.backward()
        loss.backward()
        assert x.grad.full_tensor().tolist() == [2 * 2 + 2] * 4

    run_ranks(2, program)
