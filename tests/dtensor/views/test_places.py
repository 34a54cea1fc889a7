"""What a user's own Function took is in the graph where it was then, whatever becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, no_type_check

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.rounding import assert_close
from tests.tables import each
from tests.user_functions import Squared
from tilework.dtensor import DTensor, Shard, distribute_tensor, init_device_mesh
from tilework.dtensor.local_function import torch_apply
from tilework.testing import run_ranks

X = torch.arange(6.0).view(3, 2) + 1


class Tripled(torch.autograd.Function):
    """A user's own, which saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def tripled(x: Tensor) -> Tensor:
    result: Tensor = Tripled.apply(x)  # type: ignore[no-untyped-call]
    return result


def _grad(program: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    program(x).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    return x.grad.full_tensor() if isinstance(x.grad, DTensor) else x.grad


def multiplied(x: Tensor) -> Tensor:
    a = x * 2
    b = tripled(a)
    a.mul_(5)
    return b


def multiplied_twice(x: Tensor) -> Tensor:
    a = x * 2
    b = tripled(a)
    a.mul_(5)
    c = tripled(a)
    a.mul_(7)
    return b + 2 * c + 3 * a


def detached(x: Tensor) -> Tensor:
    a = x * 2
    b = tripled(a)
    a.detach_()
    return b + a


def in_a_list(x: Tensor) -> Tensor:
    a = x * 2
    b = tripled(a)
    torch._foreach_mul_([a], 5.0)
    return b + a


def of_a_view(x: Tensor) -> Tensor:
    a = (x * 2)[0]
    b = tripled(a)
    a.mul_(5)
    return b + a


def by_a_view(x: Tensor) -> Tensor:
    a = x * 2
    b = tripled(a)
    a[:, 0].mul_(5)
    a.view(-1)[1:3].t().mul_(3)
    torch._foreach_mul_([a.t()[1]], 3.0)
    a[0] = 7
    return b + a


def by_its_local_tensor(x: Tensor) -> Tensor:
    a = x * 2
    b = tripled(a)
    for part in (a, a[:2]):
        (part.to_local() if isinstance(part, DTensor) else part).mul_(5)
    return b + a + tripled(a)


def by_the_base(x: Tensor) -> Tensor:
    a = x * 2
    b = tripled(a[:, 0])
    a.mul_(5)
    return b.sum() + a


def looked_at(x: Tensor) -> Tensor:
    a = x * 2
    b = tripled(a)
    if isinstance(a, DTensor):
        a.to_local()
    return tripled(b) + tripled(a)


@each(
    "program",
    [
        *(multiplied, multiplied_twice, detached, in_a_list, of_a_view),
        *(by_a_view, by_its_local_tensor, by_the_base, looked_at),
    ],
)
@each("dim", [0, 1])
def test_writes_after_a_function_took_it(program: Callable[[Tensor], Tensor], dim: int) -> None:
    wanted = _grad(program, X.clone().requires_grad_())

    def on_rank(rank: int) -> Tensor:
        x = distribute_tensor(X.clone(), init_device_mesh("cpu", (2,)), [Shard(dim)])
        return _grad(program, x.requires_grad_())

    for got in run_ranks(2, on_rank):
        assert_close(got, wanted)


def test_functions_that_took_it_at_two_places_in_a_chain() -> None:
    class Added(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            return x + y

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            return grad, grad

    def on_rank(rank: int) -> None:
        x: Any = distribute_tensor(X.clone(), init_device_mesh("cpu", (2,)), [Shard(0)])
        a = x.requires_grad_() * 2
        b = tripled(a)
        a.mul_(5)
        c = Added.apply(a, b)  # type: ignore[no-untyped-call]
        c.sum().backward()
        assert x.grad.full_tensor().eq(2 * 5 + 2 * 3).all()

    run_ranks(2, on_rank)


@pytest.mark.parametrize("dim", [0, 1])
def test_gradients_of_gradients_go_through_functions(dim: int) -> None:
    def run(x: Tensor) -> Tensor:
        y = Squared.apply(x * 2)  # type: ignore[no-untyped-call]
        (grad,) = torch.autograd.grad((y * y).sum(), [x], create_graph=True)
        (grad * grad).sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        return x.grad

    wanted = run(X.clone().requires_grad_())

    def on_rank(rank: int) -> Any:
        x: Any = distribute_tensor(X.clone(), init_device_mesh("cpu", (2,)), [Shard(dim)])
        result: Any = run(x.requires_grad_())
        return result.full_tensor()

    for got in run_ranks(2, on_rank):
        assert_close(got, wanted)


class Exponential(torch.autograd.Function):
    """A user's own, which saves what it has written to, and returns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.clone()
        result[:1].exp_()
        result[1:].exp_()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        return grad * result  # type: ignore[no-any-return]


def exponential(x: Tensor) -> Tensor:
    result: Tensor = Exponential.apply(x)  # type: ignore[no-untyped-call]
    return result


def squared(x: Tensor) -> Tensor:
    result: Tensor = Squared.apply(x)  # type: ignore[no-untyped-call]
    return result


def again(x: Tensor) -> Tensor:
    result: Tensor = checkpoint(torch.sin, x, use_reentrant=False)
    return result


@no_type_check
def without_graph(x: Tensor) -> None:
    with torch.no_grad():
        x.add_(1)


#: Of a tensor, what a Function takes of it; and a write. torch compares versions in C++ where they
#: are of one tensor; views of another have that of its memory.
WRITES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Any]]] = {
    "itself": (lambda x: x, lambda x: x.add_(1)),
    "by a view": (lambda x: x, lambda x: x[:, 0].mul_(2)),
    "a view": (lambda x: x[1:], lambda x: x.add_(1)),
    "by another view": (lambda x: x[:, 0], lambda x: x.t()[1].zero_()),
    "without a graph": (lambda x: x, without_graph),
    "a view, without a graph": (lambda x: x[1:], without_graph),
    "detached": (lambda x: x.detach().requires_grad_(), lambda x: x.detach().add_(1)),
    "in a list": (lambda x: x, lambda x: torch._foreach_add_([x], 1.0)),
    "as out": (lambda x: x, lambda x: torch.add(x.detach(), 1.0, out=x.detach())),
    "by an index": (lambda x: x, lambda x: x.__setitem__((slice(None), 1), 5.0)),
    "by a copied view": (lambda x: x, lambda x: x.reshape(-1)[3:].fill_(1)),
}


@each(
    ("function", "write"),
    [
        *((squared, write) for write in WRITES),
        # A checkpoint asks C++, which knows nothing of views.
        *((again, write) for write, (taken, _) in WRITES.items() if taken(X) is X),
    ],
)
@each("dim", [0, 1])
def test_what_a_function_saved_may_not_be_written_to(
    function: Callable[[Tensor], Tensor], write: str, dim: int
) -> None:
    taken, writes = WRITES[write]

    def program(x: Tensor, linked: bool) -> None:
        whole = x * 1
        result = function(taken(whole))
        result = result * 2 if linked else result
        writes(whole)
        with pytest.raises(
            RuntimeError, match=r"modified by an inplace|written to between|had to move"
        ):
            result.sum().backward()  # type: ignore[no-untyped-call]

    for linked in (False, True):
        program(X.clone().requires_grad_(), linked)

        def on_rank(rank: int, linked: bool = linked) -> None:
            x = distribute_tensor(X.clone(), init_device_mesh("cpu", (2,)), [Shard(dim)])
            program(x.requires_grad_(), linked)

        run_ranks(2, on_rank)


@each("write", [None, lambda x: x.add_(1), lambda x: x[0].zero_(), without_graph])
def test_what_a_function_saved_of_its_result(write: Callable[[Tensor], Any] | None) -> None:
    def program(x: Tensor) -> Any:
        result = exponential(x * 1)
        if write is not None:
            write(result)
            with pytest.raises(RuntimeError, match="modified by an inplace"):
                result.sum().backward()  # type: ignore[no-untyped-call]
            return None
        return _grad(lambda x: exponential(x * 1), x)

    wanted = program(X.clone().requires_grad_())

    def on_rank(rank: int) -> Any:
        x = distribute_tensor(X.clone(), init_device_mesh("cpu", (2,)), [Shard(0)])
        return program(x.requires_grad_())

    for got in run_ranks(2, on_rank):
        assert_close(got, wanted)


@each("write", [lambda x: x.data.add_(1), lambda x: x.data[0].zero_(), lambda x: x.clone().add_(1)])
def test_writes_that_torch_does_not_count_are_not_refused(write: Callable[[Tensor], Any]) -> None:
    def program(x: Tensor) -> Tensor:
        whole = x * 1
        result = squared(whole[1:]) * 2
        write(whole)
        return result

    wanted = _grad(program, X.clone().requires_grad_())

    def on_rank(rank: int) -> Tensor:
        x = distribute_tensor(X.clone(), init_device_mesh("cpu", (2,)), [Shard(1)])
        return _grad(program, x.requires_grad_())

    for got in run_ranks(2, on_rank):
        assert_close(got, wanted)


def test_a_function_that_goes_past_the_wrapper_is_linked_late_or_refused() -> None:
    past: Any = torch_apply.__get__(None, Tripled)  # kept before tilework's import

    def on_rank(rank: int) -> None:
        x: Any = distribute_tensor(X.clone(), init_device_mesh("cpu", (2,)), [Shard(0)])
        a = x.requires_grad_() * 2
        b = past(a)
        (b + 1).sum().backward()
        assert x.grad.full_tensor().eq(6).all()
        late = past(a)
        a.mul_(5)
        with pytest.raises(RuntimeError, match=r"was written to between the call of Tripled"):
            _ = late + 1

    run_ranks(2, on_rank)
