"""Gradients of functional collectives are those of the sum of all ranks' losses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tilework.distributed.functional as functional
from tests.comm.functional import reference as model
from tests.comm.functional.reference import Case, Tensors, cases
from tests.hypothesis_settings import examples
from tests.rounding import assert_close
from tests.tables import each
from tilework.comm.functional import running
from tilework.testing import run_ranks

LIMIT = timedelta(seconds=120)
WAYS = ("at once", "later", "operators")


class Bystander(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Does nothing, but has collectives go through their operators."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def by(way: str) -> Iterator[None]:
    """Have every collective of this process go that way; modes are this thread's."""
    before = running.AT_ONCE_BYTES
    running.AT_ONCE_BYTES = -1 if way == "later" else before
    try:
        yield
    finally:
        running.AT_ONCE_BYTES = before


def values(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    """Small numbers, some of them zero and some equal on several ranks."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(-2, 3, shape, generator=generator).to(torch.float64)
    if dtype.is_complex:
        whole = torch.complex(whole, torch.randint(-2, 3, shape, generator=generator).double())
    return whole.to(dtype)


def grads(outputs: Tensors, inputs: Tensors, weights: Tensors, again: bool) -> Tensors:
    """The gradients of the weighted outputs' sum, zeros where there is none."""
    pairs = [(y, w) for y, w in zip(outputs, weights, strict=True) if y.requires_grad]
    found = torch.autograd.grad(
        [y for y, _ in pairs],
        inputs,
        [w for _, w in pairs],
        create_graph=again,
        allow_unused=True,
        materialize_grads=True,
    )
    return list(found)


def expected(case: Case, xs: Tensors, ws: Tensors, vs: Tensors) -> tuple[Tensors, ...]:
    """(results, gradients, second gradients by input, … by weight) of all ranks."""
    xs = [x.clone().requires_grad_() for x in xs]
    ws = [w.clone().requires_grad_() for w in ws]
    ys = case.model(xs)
    first = grads(ys, xs, ws, again=True)
    second = grads(first, [*xs, *ws], vs, again=False)
    return ys, first, second[: case.n], second[case.n :]


def found(case: Case, way: str, xs: Tensors, ws: Tensors, vs: Tensors) -> list[tuple[Tensor, ...]]:
    def body(rank: int) -> tuple[Tensor, ...]:
        mode: Any = Bystander if way == "operators" else contextlib.nullcontext
        with mode():
            x, w = xs[rank].clone().requires_grad_(), ws[rank].clone().requires_grad_()
            y = case.call(x)
            (first,) = grads([y], [x], [w], again=True)
            second = grads([first], [x, w], [vs[rank]], again=False)
            return tuple(functional.wait_tensor(t).detach() for t in (y, first, *second))

    with by(way):
        return run_ranks(case.n, body, timeout=LIMIT)


def check(case: Case, way: str, dtype: torch.dtype, seed: int) -> None:
    xs = [values(shape, seed + rank, dtype) for rank, shape in enumerate(case.shapes)]
    shapes = [tuple(y.shape) for y in case.model(xs)]
    ws = [values(shape, seed + 10 + rank, dtype) for rank, shape in enumerate(shapes)]
    vs = [values(shape, seed + 20 + rank, dtype) for rank, shape in enumerate(case.shapes)]
    wanted = expected(case, xs, ws, vs)
    got = found(case, way, xs, ws, vs)
    names = ("result", "gradient", "second gradient by input", "second gradient by weight")
    for name, of_all, column in zip(names, wanted, zip(*got, strict=True), strict=True):
        for rank, (want, have) in enumerate(zip(of_all, column, strict=True)):
            note = f"{case}, rank {rank}, {name}: got {have}, expected {want}"
            assert_close(have, want.detach(), msg=note)


@pytest.mark.parametrize("way", WAYS)
@given(case=cases(), seed=st.integers(0, 1000))
@examples(60)
def test_real_gradients_and_their_gradients(way: str, case: Case, seed: int) -> None:
    check(case, way, torch.float64, seed)


@pytest.mark.parametrize("way", WAYS)
@given(case=cases(ops=(*model.LINEAR, "product")), seed=st.integers(0, 1000))
@examples(25)
def test_complex_gradients_are_conjugated(way: str, case: Case, seed: int) -> None:
    check(case, way, torch.complex128, seed)


# -- numerically -------------------------------------------------------------------------------


class Joint(torch.autograd.Function):
    """A collective on all ranks as one function of all their tensors, run by the ranks."""

    @staticmethod
    def forward(ctx: Any, case: Case, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.case = case
        ctx.save_for_backward(*xs)
        return tuple(run_ranks(case.n, lambda rank: case.call(xs[rank].detach()), timeout=LIMIT))

    @staticmethod
    def backward(ctx: Any, *ws: Tensor) -> tuple[Tensor | None, ...]:
        xs = ctx.saved_tensors

        def body(rank: int) -> Tensor:
            # Autograd runs backward without grad mode, and ranks are other threads.
            with torch.enable_grad():
                x = xs[rank].detach().requires_grad_()
                (grad,) = grads([ctx.case.call(x)], [x], [ws[rank]], again=False)
            return grad

        return (None, *run_ranks(ctx.case.n, body, timeout=LIMIT))


NUMERIC = (
    *(model.all_reduce(2, (2,), op) for op in model.OPS),
    model.reduce_scatter(2, (2,), 0, [1, 2], "product"),
    model.all_gather(2, (2, 2), 1, [1, 2]),
    model.all_to_all(2, (1,), [[1, 0], [2, 1]]),
    model.broadcast(2, (2,), 1),
    model.reduce(2, (2,), "avg", 1),
    model.gather(2, (2,), 0, [1, 2], 1),
    model.scatter(2, (2,), 0, [1, 2], 0),
    model.permute(3, (2,), [1, -1, 0]),
)


@each("case", NUMERIC)
def test_gradients_are_those_of_finite_differences(case: Case) -> None:
    """Of the joint function of all ranks: no formula of ours on either side."""
    generator = torch.Generator().manual_seed(3)
    xs = [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in case.shapes
    ]
    assert torch.autograd.gradcheck(lambda *xs: Joint.apply(case, *xs), xs)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("op", ["sum", "product"])
def test_complex_gradients_are_those_of_finite_differences(op: str) -> None:
    case = model.all_reduce(2, (2,), op)
    generator = torch.Generator().manual_seed(4)
    xs = [
        torch.randn(shape, generator=generator, dtype=torch.complex128).requires_grad_()
        for shape in case.shapes
    ]
    assert torch.autograd.gradcheck(lambda *xs: Joint.apply(case, *xs), xs)  # type: ignore[no-untyped-call]


def test_gradients_of_collectives_are_the_adjoints() -> None:
    """pytorch#153016, pytorch#58005: the sum of all ranks' losses, by each rank's input."""
    xs = [torch.randn(4, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]

    def derivative(program: Callable[[list[Tensor]], Tensor]) -> list[Tensor]:
        leaves = [one.clone().requires_grad_() for one in xs]
        return list(torch.autograd.grad(program(leaves), leaves))

    rows = torch.randn(2, 8)
    total = derivative(lambda x: (x[0] + x[1]).sin() @ rows[:, :4].sum(0))
    gathered = derivative(lambda x: torch.cat(x).sin() @ rows.sum(0))
    scattered = derivative(lambda x: (x[0] + x[1]).sin() @ rows[0, :4])
    swapped = derivative(lambda x: torch.cat([*x[0].split(2), *x[1].split(2)]).sin() @ rows[0])  # type: ignore[no-untyped-call]

    def program(rank: int) -> None:
        def grad(fn: Callable[[Tensor], Tensor]) -> Tensor:
            x = xs[rank].clone().requires_grad_()
            return torch.autograd.grad(fn(x), x)[0]

        assert_close(grad(lambda x: functional.all_reduce(x).sin() @ rows[rank, :4]), total[rank])
        whole = grad(lambda x: functional.all_gather_tensor(x, 0).sin() @ rows[rank])
        assert_close(whole, gathered[rank])
        mine = rows[0, :4].split(2)[rank]  # type: ignore[no-untyped-call]
        assert_close(
            grad(lambda x: functional.reduce_scatter_tensor(x, "sum", 0).sin() @ mine),
            scattered[rank],
        )
        other = torch.cat([part.split(2)[rank] for part in rows[0].split(4)])  # type: ignore[no-untyped-call]
        assert_close(grad(lambda x: functional.all_to_all_single(x).sin() @ other), swapped[rank])

    run_ranks(2, program)
