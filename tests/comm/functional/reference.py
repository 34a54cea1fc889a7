"""All ranks at once, without communication: what functional collectives and their gradients are.

Each model takes the list of all ranks' tensors and returns the list of all ranks' results, in plain
differentiable torch. Gradients of the sum of all ranks' losses follow by autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

import tilework.distributed as dist
from tilework.distributed import functional

Tensors = list[Tensor]


@dataclass(frozen=True)
class Case:
    """A collective with its arguments, on ``n`` ranks."""

    title: str
    n: int
    #: The shape of each rank's tensor.
    shapes: tuple[tuple[int, ...], ...]
    #: What each rank calls.
    call: Callable[[Tensor], Tensor]
    #: The same for all ranks at once.
    model: Callable[[Tensors], Tensors]

    def __repr__(self) -> str:
        return f"{self.title} on {self.n} ranks, shapes {list(self.shapes)}"


def factor(rank: int) -> float:
    """Each rank's own factor in a PREMUL_SUM."""
    return 0.5 + rank


def combined(op: str, xs: Tensors) -> Tensor:
    """The reduction of all ranks' tensors."""
    stack = torch.stack(xs)
    if op == "premul_sum":
        return torch.stack([x * factor(rank) for rank, x in enumerate(xs)]).sum(0)
    if op == "product":
        return stack.prod(0)
    if op in ("min", "max"):
        return stack.amin(0) if op == "min" else stack.amax(0)
    return stack.sum(0) if op == "sum" else stack.mean(0)


def given(op: str) -> str | dist.ReduceOp:
    """``op`` as a rank passes it."""
    return dist.make_premul_sum(factor(dist.get_rank())) if op == "premul_sum" else op


def alike(n: int, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The same shape on every rank."""
    return (tuple(shape),) * n


def rows_in(shape: Sequence[int], dim: int, rows: int) -> tuple[int, ...]:
    """``shape`` with ``rows`` at ``dim``."""
    changed = list(shape)
    changed[dim] = rows
    return tuple(changed)


# -- one function per collective ---------------------------------------------------------------


def all_reduce(n: int, shape: Sequence[int], op: str) -> Case:
    return Case(
        f"all_reduce {op}",
        n,
        alike(n, shape),
        lambda x: functional.all_reduce(x, given(op)),
        lambda xs: [combined(op, xs)] * n,
    )


def reduce(n: int, shape: Sequence[int], op: str, dst: int) -> Case:
    def model(xs: Tensors) -> Tensors:
        total = combined(op, xs)
        return [total if rank == dst else 0 * total for rank in range(n)]

    return Case(
        f"reduce {op} to {dst}",
        n,
        alike(n, shape),
        lambda x: functional.reduce(x, dst, given(op)),
        model,
    )


def scan(n: int, shape: Sequence[int], op: str, own: bool, reverse: bool) -> Case:
    def model(xs: Tensors) -> Tensors:
        terms = [x * factor(r) for r, x in enumerate(xs)] if op == "premul_sum" else xs
        counted = [terms[r + 1 - own :] if reverse else terms[: r + own] for r in range(n)]
        return [sum(some, 0 * x) for some, x in zip(counted, xs, strict=True)]

    call = functional.scan if own else functional.exscan
    title = f"{call.__name__} {op} {reverse}"
    return Case(title, n, alike(n, shape), lambda x: call(x, given(op), None, reverse), model)


def broadcast(n: int, shape: Sequence[int], src: int) -> Case:
    return Case(
        f"broadcast from {src}",
        n,
        alike(n, shape),
        lambda x: functional.broadcast(x, src),
        lambda xs: [xs[src].clone() for _ in xs],
    )


def all_gather(n: int, shape: Sequence[int], dim: int, sizes: list[int] | None) -> Case:
    rows = sizes or [shape[dim]] * n
    return Case(
        f"all_gather along {dim}, {sizes}",
        n,
        tuple(rows_in(shape, dim, count) for count in rows),
        lambda x: functional.all_gather_tensor(x, dim, sizes=sizes),
        lambda xs: [torch.cat(xs, dim)] * n,
    )


def gather(n: int, shape: Sequence[int], dim: int, sizes: list[int], dst: int) -> Case:
    def model(xs: Tensors) -> Tensors:
        whole = torch.cat(xs, dim)
        return [whole if rank == dst else whole.narrow(dim, 0, 0) for rank in range(n)]

    return Case(
        f"gather to {dst} along {dim}, {sizes}",
        n,
        tuple(rows_in(shape, dim, count) for count in sizes),
        lambda x: functional.gather(x, dst, dim, sizes=sizes),
        model,
    )


def scatter(n: int, shape: Sequence[int], dim: int, sizes: list[int], src: int) -> Case:
    return Case(
        f"scatter from {src} along {dim}, {sizes}",
        n,
        tuple(rows_in(shape, dim, sum(sizes) if rank == src else 0) for rank in range(n)),
        lambda x: functional.scatter(x, src, sizes, dim),
        lambda xs: list(torch.split(xs[src], sizes, dim)),
    )


def reduce_scatter(n: int, shape: Sequence[int], dim: int, sizes: list[int], op: str) -> Case:
    return Case(
        f"reduce_scatter {op} along {dim}, {sizes}",
        n,
        alike(n, rows_in(shape, dim, sum(sizes))),
        lambda x: functional.reduce_scatter_tensor(x, given(op), dim, sizes=sizes),
        lambda xs: list(torch.split(combined(op, xs), sizes, dim)),
    )


def all_to_all(n: int, shape: Sequence[int], splits: list[list[int]]) -> Case:
    """``splits[s][d]`` rows go from s to d."""

    def call(x: Tensor) -> Tensor:
        rank = dist.get_rank()
        received = [row[rank] for row in splits]
        return functional.all_to_all_single(x, received, splits[rank])

    def model(xs: Tensors) -> Tensors:
        parts = [torch.split(x, row) for x, row in zip(xs, splits, strict=True)]
        return [torch.cat([parts[s][d] for s in range(n)]) for d in range(n)]

    shapes = tuple(rows_in(shape, 0, sum(row)) for row in splits)
    return Case(f"all_to_all {splits}", n, shapes, call, model)


def permute(n: int, shape: Sequence[int], destinations: list[int]) -> Case:
    def model(xs: Tensors) -> Tensors:
        out = [0 * x for x in xs]
        for source, destination in enumerate(destinations):
            if destination >= 0:
                out[destination] = xs[source].clone()
        return out

    return Case(
        f"permute {destinations}",
        n,
        alike(n, shape),
        lambda x: functional.permute_tensor(x, destinations),
        model,
    )


# -- random ones -------------------------------------------------------------------------------

LINEAR = ("sum", "avg", "premul_sum")
ORDER = ("min", "max")
OPS = (*LINEAR, "product", *ORDER)


@st.composite
def cases(draw: st.DrawFn, ops: Sequence[str] = OPS) -> Case:
    """Any collective on 1 to 4 ranks, with shapes even, uneven and empty."""
    n = draw(st.integers(1, 4))
    shape = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    root = draw(st.integers(0, n - 1))
    op = draw(st.sampled_from(ops))
    sizes = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    kind = draw(st.integers(0, 9))
    if kind == 7:
        row = st.lists(st.integers(0, 2), min_size=n, max_size=n)
        return all_to_all(n, shape, draw(st.lists(row, min_size=n, max_size=n)))
    if kind == 8:
        order = draw(st.permutations(range(n)))
        silent = draw(st.lists(st.booleans(), min_size=n, max_size=n))
        pairs = zip(order, silent, strict=True)
        return permute(n, shape, [-1 if quiet else to for to, quiet in pairs])
    if kind == 9:
        op = "premul_sum" if op == "premul_sum" else "sum"
        return scan(n, shape, op, draw(st.booleans()), draw(st.booleans()))
    made = (
        lambda: all_reduce(n, shape, op),
        lambda: reduce(n, shape, op, root),
        lambda: broadcast(n, shape, root),
        lambda: all_gather(n, shape, dim, draw(st.sampled_from([None, sizes]))),
        lambda: gather(n, shape, dim, sizes, root),
        lambda: scatter(n, shape, dim, sizes, root),
        lambda: reduce_scatter(n, shape, dim, sizes, op),
    )
    return made[kind]()
