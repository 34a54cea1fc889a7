"""Products of matrices and vectors on DTensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.dtensor.op_checks import Layout, check_op, count_op, noting_gatherings
from tests.tables import each
from tilework.dtensor import (
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from tilework.testing import run_ranks

R, P = Replicate(), Partial()
MESHES = [(3,), (2, 2)]


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=dtype)


def products(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [drawn(*shape) for shape in shapes]


@each(
    "shapes",
    [
        [(5,), (5,)],
        [(5,), (5, 4)],
        [(3, 5), (5,)],
        [(3, 5), (5, 4)],
        [(2, 3, 5), (5,)],
        [(5,), (2, 5, 4)],
        [(2, 3, 5), (5, 4)],
        [(3, 5), (2, 5, 4)],
        [(1, 3, 5), (2, 5, 4)],
        [(3, 1, 2, 5), (4, 5, 3)],
        [(3, 0), (0, 4)],
        [(0, 5), (5, 2)],
    ],
)
def test_matmul_of_any_ranks(shapes: list[tuple[int, ...]]) -> None:
    check_op(torch.matmul, *products(*shapes), meshes=MESHES, most=2, gathers=False)


PRODUCTS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "mm": (torch.mm, [(4, 3), (3, 5)]),
    "bmm": (torch.bmm, [(3, 4, 2), (3, 2, 5)]),
    "mv": (torch.mv, [(4, 3), (3,)]),
    "dot": (torch.dot, [(5,), (5,)]),
    "vdot": (torch.vdot, [(5,), (5,)]),
    "inner": (torch.inner, [(2, 3, 4), (5, 4)]),
    "inner with a number": (torch.inner, [(2, 3), ()]),
    "outer": (torch.outer, [(3,), (4,)]),
    "vecdot": (torch.linalg.vecdot, [(2, 3, 4), (3, 1)]),
    "vecdot along 0": (lambda x, y: torch.linalg.vecdot(x, y, dim=0), [(4, 3), (4, 1)]),
    "cross": (lambda x, y: torch.cross(x, y, dim=1), [(2, 3, 2), (2, 3, 1)]),
    "cross of parts as large as 3": (lambda x, y: torch.cross(x, y, dim=-1), [(5, 3), (5, 3)]),
    "linalg.cross": (torch.linalg.cross, [(2, 4, 3), (1, 4, 3)]),
    "rmatmul": (lambda x, y: x.__rmatmul__(y), [(4, 3), (5, 4)]),
    "@": (lambda x, y: x @ y, [(4, 3), (3, 2)]),
    "linear": (F.linear, [(2, 3, 5), (4, 5), (4,)]),
    "linear without bias": (F.linear, [(5,), (4, 5)]),
    "linear of one row of weights": (F.linear, [(2, 5), (5,)]),
    "bilinear": (F.bilinear, [(3, 2), (3, 4), (5, 2, 4), (5,)]),
    "addmm": (lambda i, a, b: torch.addmm(i, a, b, beta=2, alpha=3), [(5,), (4, 3), (3, 5)]),
    "addmm of a column": (torch.addmm, [(4, 1), (4, 3), (3, 5)]),
    "addmm of a matrix": (torch.addmm, [(4, 5), (4, 3), (3, 5)]),
    "addmv": (torch.addmv, [(1,), (4, 3), (3,)]),
    "addr": (lambda i, a, b: i.addr(a, b, beta=2), [(3, 1), (3,), (4,)]),
    "addbmm": (torch.addbmm, [(4, 5), (3, 4, 2), (3, 2, 5)]),
    "baddbmm": (torch.baddbmm, [(4, 1), (3, 4, 2), (3, 2, 5)]),
    "multi_dot of matrices": (
        lambda *x: torch.linalg.multi_dot(x),
        [(2, 3), (3, 4), (4, 5)],
    ),
    "multi_dot": (lambda *x: torch.linalg.multi_dot(x), [(3,), (3, 4), (4, 2), (2,)]),
    "tensordot": (torch.tensordot, [(2, 3, 4), (3, 4, 5)]),
    "tensordot of dims": (
        lambda x, y: torch.tensordot(x, y, dims=([2, 0], [0, -1])),
        [(2, 3, 4), (4, 5, 2)],
    ),
    "outer tensordot": (lambda x, y: torch.tensordot(x, y, dims=0), [(2, 3), (4,)]),
}


@each("name", PRODUCTS)
def test_products_are_those_of_plain_tensors(name: str) -> None:
    fn, shapes = PRODUCTS[name]
    check_op(fn, *products(*shapes), meshes=MESHES, most=2, gathers=False)


@each(
    ("equation", "shapes"),
    [
        ("ij,jk->ik", [(3, 4), (4, 5)]),
        ("ij,kj", [(3, 4), (5, 4)]),
        ("bhqd,bhkd->bhqk", [(2, 3, 4, 2), (2, 3, 5, 2)]),
        ("ij->", [(3, 4)]),
        ("ij->ji", [(3, 4)]),
        ("ii->i", [(4, 4)]),
        ("bii->b", [(3, 4, 4)]),
        ("i,j,ij->j", [(3,), (4,), (3, 4)]),
        ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 5)]),
        ("...ij,...jk->...ik", [(2, 3, 4, 5), (3, 5, 2)]),
        ("i...,j...", [(2, 3), (4, 3)]),
        ("b...->...", [(4, 2, 3)]),
        ("ij,jk->ik", [(3, 1), (4, 5)]),
    ],
)
def test_an_equation_is_its_rule(equation: str, shapes: list[tuple[int, ...]]) -> None:
    tensors = products(*shapes)
    check_op(lambda *x: torch.einsum(equation, *x), *tensors, meshes=MESHES, most=2, gathers=False)


def test_einsum_of_sublists() -> None:
    check_op(
        lambda a, b: torch.einsum(a, [0, 1], b, [1, 2], [0, 2]),
        *products((3, 4), (4, 2)),
        meshes=[(2,)],
        gathers=False,
    )


def test_products_of_complex_and_integers() -> None:
    pair = [drawn(3, 4, dtype=torch.complex128), drawn(4, 2, dtype=torch.complex128)]
    check_op(torch.matmul, *pair, meshes=[(2,)], gathers=False)
    check_op(torch.vdot, *[one[0, :3] for one in (pair[0], pair[0] * 2)], meshes=[(2,)])
    whole = torch.arange(12)
    check_op(torch.matmul, whole.view(3, 4), whole.view(4, 3), meshes=[(3,)], gathers=False)


def test_products_with_plain_tensors() -> None:
    check_op(torch.matmul, *products((4, 3), (3, 2)), meshes=[(2,)], plain=True, gathers=False)
    check_op(F.linear, *products((4, 3), (2, 3), (2,)), meshes=[(2,)], plain=True, gathers=False)


def test_addmm_in_place() -> None:
    def added(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return (out * 1).addmm_(a, b, beta=0.5)

    check_op(added, *products((4, 5), (4, 3), (3, 5)), meshes=MESHES, most=2, gathers=False)


def test_nothing_else_of_what_is_ignored() -> None:
    """With ``beta=0`` what is added may be anything."""
    a, b = products((4, 4), (4, 4))
    nan = torch.full((4,), torch.nan, dtype=a.dtype)
    check_op(
        lambda i, a, b: torch.addmm(i, a, b, beta=0),
        nan,
        a,
        b,
        grads=False,
        meshes=MESHES,
        most=4,
        partial=(),
    )


# -- what moves ------------------------------------------------------------------------------


def seen(fn: Callable[..., Any], tensors: list[Tensor], *placements: Placement) -> Any:
    return count_op(fn, *tensors, layouts=[[one] for one in placements])


def test_a_cut_sum_leaves_terms() -> None:
    found = seen(torch.mm, products((4, 6), (6, 4)), Shard(1), Shard(0))
    assert (found.forward, found.backward) == ([], [])
    assert found.placements == [(P,)]


def test_bias_is_added_once() -> None:
    found = seen(F.linear, products((4, 6), (5, 6), (5,)), Shard(1), Shard(1), R)
    assert found.forward == []
    assert found.placements == [(P,)]


def test_columns_then_rows_communicate_once() -> None:
    def layers(x: Tensor, up: Tensor, a: Tensor, down: Tensor, b: Tensor) -> Tensor:
        return F.linear(torch.relu(F.linear(x, up, a)), down, b)

    tensors = products((4, 6), (8, 6), (8,), (6, 8), (6,))
    found = seen(layers, tensors, R, Shard(0), Shard(0), Shard(1), R)
    assert found.forward == []
    assert found.placements == [(P,)]
    whole = seen(
        lambda *args: layers(*args).sum(1).relu(), tensors, R, Shard(0), Shard(0), Shard(1), R
    )
    assert whole.forward == ["all_reduce"]


@pytest.mark.filterwarnings("ignore:Using torch.cross without")
def test_cross_along_the_first_dim_of_3_of_the_whole() -> None:
    check_op(torch.cross, *products((5, 3), (5, 3)), meshes=[(2,)], most=8, gathers=False)


def test_axes_that_cut_a_sum_in_different_orders() -> None:
    """One of the two is moved, in one message, and the result is right."""
    straight, crossed = Layout((Shard(1), Shard(1))), Layout((Shard(0), Shard(0)), (1, 0))
    found = count_op(torch.mm, *products((3, 8), (8, 5)), layouts=[straight, crossed], mesh=(2, 2))
    assert found.placements == [(P, P)]
    assert len(found.forward) == 1


@each(
    ("fn", "shapes"),
    [
        (lambda a, b: torch.einsum("ij,jk->ik", a, b), [(4, 6), (3, 5)]),
        (torch.matmul, [(4, 2), (1, 5)]),
        (F.linear, [(4, 2), (5, 1)]),
        (lambda a, b: torch.addmm(b, a, a), [(3, 3), (2, 3)]),
    ],
)
def test_sizes_that_fit_by_parts_alone_are_refused(
    fn: Callable[..., Any], shapes: list[tuple[int, ...]]
) -> None:
    tensors = products(*shapes)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        first = distribute_tensor(tensors[0], mesh, [Shard(1)])
        with pytest.raises(RuntimeError):
            fn(first, distribute_tensor(tensors[1], mesh, [R]))

    with pytest.raises(RuntimeError):
        fn(*tensors)
    with noting_gatherings():
        run_ranks(2, program)


def test_dims_in_a_tensor() -> None:
    dims = torch.tensor([[1], [0]])
    a, b = products((3, 2), (2, 4))
    check_op(lambda a, b: torch.tensordot(a, b, dims=dims), a, b, meshes=[(2,)], most=6)


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no such product")
@each("columns", [False, True])
@each("ends", [[2, 2, 5, 8], [0, 8, 8, 8]])
def test_products_of_groups_of_rows(columns: bool, ends: list[int]) -> None:
    """As of experts: cut along rows, experts, what is summed, columns."""
    grouped: Callable[..., Tensor] = torch._grouped_mm
    rows, matrices = drawn(8, 16, dtype=torch.float32), drawn(4, 16, 8, dtype=torch.float32)
    if columns:
        matrices = matrices.mT.contiguous().mT

    def fn(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
        return grouped(x, w, offs=offs) * 2

    offs = torch.tensor(ends, dtype=torch.int32)
    check_op(fn, rows, matrices, offs, most=20, gathers=False, rtol=1e-4, atol=1e-4)
    batches = drawn(4, 8, 16, dtype=torch.float32)
    check_op(grouped, batches, matrices, most=8, gathers=False, rtol=1e-4, atol=1e-4)


def test_a_broken_number_times_integers_where_a_rank_sums_nothing() -> None:
    """torch takes another way through a product over nothing, which refuses such a number."""
    a, b, added = torch.tensor([[2, -1], [-2, 2]]), torch.tensor([[-2], [0]]), torch.tensor([[1]])

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        cut = distribute_tensor(b, mesh, [Shard(0, sizes=(0, 2))], src_data_rank=None)
        result: Any = torch.addmm(added, a, cut, beta=0.5)
        assert torch.equal(result.full_tensor(), torch.addmm(added, a, b, beta=0.5))

    with noting_gatherings():
        run_ranks(2, program)


def test_matrices_whose_dims_are_cut_in_unlike_orders_multiply() -> None:
    """pytorch#166598."""
    orders: Sequence[tuple[int, int] | None] = (None, (1, 0))

    def layouts(shape: tuple[int, ...]) -> list[list[Layout]]:
        dims = itertools.product((0, 1), orders, (0, 1), orders)
        return [
            [Layout((Shard(a),) * 2, first), Layout((Shard(b),) * 2, second)]
            for a, first, b, second in dims
        ]

    x, y = torch.randn(6, 5), torch.randn(5, 6)
    check_op(torch.mm, x, y, meshes=((2, 2),), layouts=layouts, rtol=1e-4, atol=1e-5)


@each("dims", [([1], [0]), ([0], [1]), ([0, 1], [1, 0])])
def test_contracted_dims_of_size_one_are_broadcast(dims: tuple[list[int], list[int]]) -> None:
    """Each rank needs them, also where its shard of the other tensor is empty."""
    for a, b in [((3, 1), (5, 3)), ((3, 5), (1, 3)), ((1, 3), (3, 5)), ((1, 1), (4, 2))]:
        pair = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in (a, b)]
        try:
            torch.tensordot(pair[0], pair[1], dims)
        except RuntimeError:
            continue
        check_op(lambda x, y: torch.tensordot(x, y, dims), *pair, meshes=[(2,), (3,)], most=14)
