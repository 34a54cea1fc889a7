"""Indexing, and operators that read and write elements by index, against plain torch."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.dtensor.op_checks import MESHES, Layout, check_op, count_op
from tests.fuzz.programs import compare
from tests.tables import each
from tilework.dtensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from tilework.testing import run_ranks

A = torch.arange(24.0).reshape(4, 6)
B = torch.arange(60.0).reshape(5, 4, 3)
LINE = torch.arange(7.0)
POINT = torch.tensor(3.0)
ROWS = torch.tensor([3, 0, 0, 2, -1])
COLUMNS = torch.tensor([0, 1, 4, 5])
PAIR = torch.tensor([2, 0])
SQUARE = torch.tensor([[1, 0], [3, 2]])
MASK = torch.tensor([True, False, True, True])
WHOLE_MASK = A % 3 == 0
ALONG_0 = torch.tensor([[0, 1, 2, 3, 0, 1], [2, 2, 0, 0, 1, 3], [1] * 6, [3, 0, 3, 0, 3, 0]])
ALONG_1 = torch.tensor([[0, 5, 2], [1, 1, 4], [3, 0, 3], [5, 4, 0]])

INDICES: dict[str, Any] = {
    "number": 0,
    "last": -1,
    "range": slice(1, 3),
    "steps": (slice(None), slice(1, 5, 2)),
    "numbers": (1, 2),
    "ellipsis": (Ellipsis, -1),
    "nothing": slice(3, 1),
    "new dims": (None, slice(1, None), None, 2),
    "all": Ellipsis,
    "tensor": PAIR,
    "tensor of two dims": SQUARE,
    "tensor along the last dim": (slice(None), COLUMNS),
    "tensor and range": (slice(1, None), COLUMNS),
    "two tensors": (PAIR, PAIR + 1),
    "tensors that broadcast": (PAIR[:, None], COLUMNS),
    "tensor and number": (PAIR, 2),
    "tensor and new dim": (None, PAIR, slice(1, 4)),
    "list": [0, 2],
    "lists": ([0, 1], [2, 3]),
    "mask": MASK,
    "mask of all dims": WHOLE_MASK,
    "mask and number": (MASK, 1),
    "mask of the last dim": (slice(None), torch.tensor([True, False] * 3)),
    "True": True,
    "False": False,
    "no element": torch.zeros(0, dtype=torch.long),
    "tensor without dims": torch.tensor(2),
}


@each("name", INDICES)
def test_indexing(name: str) -> None:
    index = INDICES[name]
    mesh = MESHES[sum(map(ord, name)) % len(MESHES)]
    check_op(lambda x: x[index], A, meshes=[mesh], most=3, gathers=False)


@each("name", INDICES)
def test_writing(name: str) -> None:
    index = INDICES[name]
    mesh = MESHES[sum(map(ord, name)) % len(MESHES)]

    def write(x: Tensor, value: Tensor) -> Any:
        y, z = x.clone(), x.clone()
        y[index] = value
        z[index] = 7.5
        return y, z

    value = torch.randn(A[index].shape, generator=torch.Generator().manual_seed(1))
    check_op(write, A, value, meshes=[mesh], most=3, gathers=False)


#: What may stand between brackets, as Python: lists that are tuples, arrays, and what is refused.
FORMS = """
    [0, 1]; [[0, 1], [1, 0]]; [[[0, 1], [1, 0]]]; [[[0, 1]], [[1, 0]]]; [[0, 1]]; [1, [0, 1]]; [0.5]
    [slice(0, 2), 1]; [torch.tensor([0, 1]), 1]; [torch.tensor(0), torch.tensor(2)]; [None, 0]
    [True, False, True, False]; [[True, False, True, False]]; [True]; [[True]]; []; [[]]; ([],); ()
    ([0, 1], [1, 0]); ([[0, 1], [1, 0]],); [(0, 1), (1, 0)]; (0, (1, 2)); torch.Size([0, 1]); [...]
    [0] * 40; range(2); [range(2)] * 2; [[0, 1], slice(None), [1, 0]]; [[0, 1], [1, 0], [0, 0]]
    np.array([0, 1]); np.array([[0, 1], [1, 0]]); (np.array([0, 1]), np.array([1, 0])); np.array(1)
    [np.array([0, 1]), np.array([1, 0])]; np.array([True, False, True, False]); np.array([1.5])
    (slice(None), np.array([0, 2])); np.array([0, 1], dtype=np.int32); [np.array(0), np.array(1)]
    (slice(1, 3), [0, 1], np.array([0, 1])); (torch.tensor(1), np.array(1)); np.int64(1)
    [np.int64(0), np.int64(2)]; slice(np.int64(0), np.int64(2))
    1.5; (0.5,); "a"; {0}; np.bool_(True); np.array([0, 1], dtype=np.uint8); torch.tensor([0.5])
    torch.tensor([0, 1], dtype=torch.int16); [[0, 1], [1, 0], [0, 0], [0, 0]]
"""


def test_brackets_are_read_as_torch_reads_them() -> None:
    def outcome(x: Tensor, text: str, writes: bool) -> Any:
        try:
            index = eval(text, {"torch": torch, "np": np})
            if writes:
                x = x.clone()
                x[index] = -1.0
            else:
                x = x[index]
        except Exception as error:
            kinds = (IndexError, TypeError, Exception)
            return next(kind for kind in kinds if isinstance(error, kind))
        return x.full_tensor() if isinstance(x, DTensor) else x

    whole = torch.arange(120.0).reshape(4, 5, 6)
    forms = [text.strip() for line in FORMS.splitlines() for text in line.split(";")]
    cases = list(itertools.product(filter(None, forms), (False, True)))

    def program(rank: int) -> list[list[Any]]:
        mesh = init_device_mesh("cpu", (2,))
        layouts: list[Any] = [[Replicate()], [Shard(0)], [Shard(1)]]
        xs = [distribute_tensor(whole, mesh, layout) for layout in layouts]
        return [[outcome(x, *case) for case in cases] for x in xs]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to read lists in another way
        expected = [outcome(whole, *case) for case in cases]
        found = run_ranks(2, program)[0]
    for outcomes in found:
        for (text, writes), got, want in zip(cases, outcomes, expected, strict=True):
            is_tensor = isinstance(got, Tensor) and isinstance(want, Tensor)
            same = torch.equal(got, want) if is_tensor else got is want
            assert same, f"x[{text}]{' = -1' if writes else ''} is {got}, in torch {want}"


Case = tuple[Callable[..., Any], tuple[Tensor, ...]]

READING: dict[str, Case] = {
    "negative places": (lambda x: x[ROWS], (A,)),
    "tensors apart": (lambda x: x[PAIR, :, PAIR], (B,)),
    "tensors apart, of a range": (lambda x: x[PAIR, 1:, 1], (B,)),
    "DTensors": (lambda x, i, j: x[i[:, None], j], (A, PAIR, COLUMNS)),
    "a DTensor mask": (lambda x, m: x[m], (A, MASK)),
    "a mask from values": (lambda x: x[x > 5], (A,)),
    "True and False": (lambda x: x[ROWS], (A > 7,)),
    "whole numbers": (lambda x: x[ROWS], (A.long(),)),
    "a range by tensors": (lambda x: x[torch.tensor(1) :], (A,)),
    "index_select": (lambda x, i: torch.index_select(x, 1, i), (A, COLUMNS)),
    "index_select of a point": (lambda x: x.index_select(0, torch.tensor(0)), (POINT,)),
    "gather": (lambda x, i: x.gather(0, i), (A, ALONG_0)),
    "gather of fewer": (lambda x, i: torch.gather(x, 1, i), (A, ALONG_1[:2])),
    "take": (lambda x: x.take(torch.tensor([[0, 5], [23, -1]])), (A,)),
    "take_along_dim": (lambda x, i: x.take_along_dim(i, 1), (A, ALONG_1)),
    "take_along_dim of all": (lambda x: x.take_along_dim(torch.tensor([3, 7])), (A,)),
    "masked_select": (lambda x, m: x.masked_select(m), (A, WHOLE_MASK)),
    "nonzero": (lambda x: (x.nonzero(), x.nonzero(as_tuple=True)), (WHOLE_MASK,)),
    "argwhere": (torch.argwhere, (WHOLE_MASK.long(),)),
    "isin": (torch.isin, (A, LINE)),
    "one_hot": (lambda x: F.one_hot(x, 6), (COLUMNS,)),
}

WRITING: dict[str, Case] = {
    "smaller value": (lambda x, v: _set(x, (slice(None), slice(1, 3)), v), (A, A[:, :1])),
    "value with more dims": (lambda x, v: _set(x, 1, v), (A, A[:1])),
    "value of another dtype": (lambda x, v: _set(x, slice(0, 2), v), (A, torch.ones(6).long())),
    "where a mask from values is True": (lambda x: _set(x, x > 5, 0.0), (A,)),
    "index_add": (lambda x, s: x.index_add(0, ROWS.abs(), s, alpha=2), (A, A[[0, 1, 2, 3, 0]])),
    "index_add_": (lambda x, s: x.clone().index_add_(1, PAIR, s), (A, A[:, :2])),
    "index_copy": (lambda x, s: x.index_copy(0, PAIR, s), (A, A[:2] * 2)),
    "index_copy_": (lambda x, s: x.clone().index_copy_(1, PAIR, s), (A, A[:, 3:5])),
    "index_fill": (lambda x: x.index_fill(0, PAIR, 2.5), (A,)),
    "index_fill_": (lambda x, v: x.clone().index_fill_(1, PAIR, v), (A, POINT)),
    "index_fill, some twice": (
        lambda x, v: x.index_fill(0, torch.tensor([1, 1, 0, -1]) % x.shape[0], v),
        (A, POINT),
    ),
    "put of none to a point": (
        lambda x, v: x.put(torch.tensor([], dtype=torch.long), v[:0].flatten()),
        (POINT, A),
    ),
    "index_fill of a point": (lambda x: x.index_fill(0, torch.tensor([0]), 2.5), (POINT,)),
    "index_put": (lambda x, v: x.index_put((PAIR,), v), (A, A[:2] * 2)),
    "index_put adds": (
        lambda x, v: x.index_put((ROWS,), v, accumulate=True),
        (A, A[[0, 1, 2, 3, 0]]),
    ),
    "index_put_ by mask": (lambda x, v: x.clone().index_put_((MASK,), v), (A, A[1:] * 2)),
    "put": (lambda x, s: x.put(torch.tensor([0, 23, 7]), s), (A, LINE[:3])),
    "put_ adds": (
        lambda x, s: x.clone().put_(torch.tensor([0, -1, 0]), s, accumulate=True),
        (A, LINE[:3]),
    ),
    "scatter": (lambda x, i, s: x.scatter(1, i, s), (A, ALONG_1[:, :2], A[:, 2:4] * 2)),
    "scatter of a number": (lambda x, i: x.clone().scatter_(1, i, 1.5), (A, ALONG_1[:2])),
    "scatter_add": (lambda x, i, s: x.scatter_add(1, i, s), (A, ALONG_1, A)),
    "scatter_add_": (lambda x, i, s: x.clone().scatter_add_(0, i, s), (A, ALONG_0, A)),
    "scatter of several to a point": (
        lambda x, s: x.scatter(0, torch.zeros(6, dtype=torch.long), s),
        (POINT, torch.full((6,), 2.5)),
    ),
    "scatter_add_ of several to a point": (
        lambda x, s: x.clone().scatter_add_(-1, torch.zeros(6, dtype=torch.long), s),
        (POINT, A.flatten()[:6]),
    ),
    "scatter_reduce": (
        lambda x, i, s: x.scatter_reduce(0, i, s, "amax", include_self=False),
        (A, ALONG_0, A + 0.5),
    ),
    "diagonal_scatter": (lambda x, s: torch.diagonal_scatter(x, s), (A, LINE[:4])),
    "select_scatter": (lambda x, s: x.select_scatter(s, 0, 2), (A, LINE[:6])),
    "slice_scatter": (lambda x, s: x.slice_scatter(s, 1, 2, None, 2), (A, A[:, :2] * 2)),
    "masked_scatter": (lambda x, m, s: x.masked_scatter(m, s), (A, WHOLE_MASK, A)),
}


def _set(x: Tensor, index: Any, value: Any) -> Tensor:
    made = x.clone()
    made[index] = value
    return made


@each("name", READING | WRITING)
def test_operators(name: str) -> None:
    fn, args = (READING | WRITING)[name]
    mesh = MESHES[sum(map(ord, name)) % len(MESHES)]
    check_op(fn, *args, meshes=[mesh], most=3, gathers=False)


@each("reduce", ["prod", "mean", "amax", "amin"])
@pytest.mark.filterwarnings("ignore:index_reduce.* is in beta")
def test_index_reduce(reduce: str) -> None:
    check_op(
        lambda x, s: x.index_reduce(0, ROWS.abs(), s, reduce),
        A + 1,
        torch.arange(1.0, 31.0).reshape(5, 6),
        meshes=[(2,)],
        most=4,
        gathers=False,
    )


def test_several_axes_on_the_written_dim() -> None:
    """Where what is written cannot be told by placements."""
    both = [Layout((Shard(0), Shard(0))), Layout((Shard(0), Shard(0)), (1, 0))]
    rows = torch.arange(20.0).reshape(10, 2)
    check_op(
        lambda x: (_set(x, slice(1, 8), 3.0), _set(x, 4, x[9]), x[2:9:3]),
        rows,
        meshes=[(2, 2)],
        layouts=lambda _: [[one] for one in both],
    )


# -- what moves ------------------------------------------------------------------------------


@each(
    ("fn", "placements"),
    [
        (lambda x: x[:, COLUMNS], (Shard(0),)),
        (lambda x: x.gather(1, ALONG_1), (Shard(0),)),
        (lambda x: _set(x, slice(1, 3), 2.0), (Shard(0),)),
        (lambda x: _set(x, 2, 2.0), (Shard(0),)),
        (lambda x: _set(x, PAIR, 2.0), (Shard(0),)),
        (lambda x: x.index_fill(0, PAIR, 2.0), (Shard(0),)),
        (lambda x: x.index_add(0, PAIR, torch.ones(2, 6)), (Shard(0),)),
        (lambda x: x.scatter(0, ALONG_0, 1.0), (Shard(0),)),
    ],
)
def test_nothing_moves(fn: Callable[[Tensor], Tensor], placements: Any) -> None:
    seen = count_op(fn, A, layouts=[[Shard(0)]])
    assert seen.forward == seen.backward == seen.gathered == []
    assert seen.placements == [placements]


def test_elements_of_a_large_cut_dim_are_in_terms() -> None:
    table = torch.arange(40_000.0).reshape(10_000, 4)
    seen = count_op(lambda x: x[PAIR], table, layouts=[[Shard(0)]])
    assert seen.placements == [(Partial(),)]
    assert seen.forward == seen.backward == []


# -- what is wrong ---------------------------------------------------------------------------


def test_places_outside_of_the_tensor() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(A, mesh, [Shard(0)], src_data_rank=None)
        wrong: Any
        for wrong in (torch.tensor([0, 4]), 4, -5, (1, 2, 3)):
            with pytest.raises(IndexError):
                x[wrong]
        with pytest.raises(IndexError, match="mask"):
            x[torch.ones(3, dtype=torch.bool)]
        columns = distribute_tensor(A, mesh, [Shard(1)], src_data_rank=None)
        with pytest.raises(IndexError):  # also of a rank that no element would be written on
            columns.put_(torch.tensor([A.numel()]), torch.ones(1))
        assert torch.equal(x.full_tensor(), A)

    run_ranks(2, program)


GRID = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


def test_index_put_writes_where_torch_does() -> None:
    """pytorch#172350."""

    def put(x: Tensor, rows: Tensor, columns: Tensor, values: Tensor) -> list[Tensor]:
        made = x.clone()
        made[rows, columns] = values
        other = x.index_put((rows,), values[:, None], accumulate=True)
        added = x.clone().index_put_((rows, columns), values, accumulate=True)
        return [made, other, added]

    rows, columns = torch.tensor([0, 3, 1]), torch.tensor([5, 0, 2])
    check_op(put, GRID, rows, columns, torch.randn(3), most=16)


@each(
    "write",
    [
        lambda x: x.index_add_(0, torch.tensor([1, 2]), torch.tensor(2.0)),
        lambda x: x.index_add_(0, torch.tensor([1]), torch.tensor(2.0)),
        lambda x: x.index_copy_(0, torch.tensor([1, 2]), torch.tensor(2.0)),
        lambda x: x.index_copy_(0, torch.tensor([-1]), torch.ones(1)),
        lambda x: x.index_add_(0, torch.tensor([-6]), torch.ones(1)),
        lambda x: x.index_add(0, torch.tensor(6), torch.ones(1)),
        lambda x: x.index_copy_(0, torch.tensor([[1]]), torch.tensor([2.0])),
        lambda x: x[None].index_add(0, torch.tensor([0]), torch.ones(6)),
        lambda x: x[None].index_copy(0, torch.tensor([0]), torch.ones(6)),
        lambda x: x[None].index_reduce(1, torch.tensor([0]), torch.ones(1, 6), "prod"),
        lambda x: x.put_(torch.tensor([1, 2]), torch.tensor(2.0)),
        lambda x: x.view(2, 3).put_(torch.tensor([6]), torch.tensor([2.0])),
        lambda x: x.view(2, 3).put_(torch.tensor([-7]), torch.tensor([2.0])),
        lambda x: x[:0].quantile(0.5, 0),
    ],
)
def test_what_torch_refuses_is_refused(write: Callable[[Any], Any]) -> None:
    with pytest.raises((RuntimeError, IndexError)):
        write(torch.ones(6))

    def program(rank: int) -> None:
        for placement in (Shard(0), Replicate()):
            x = distribute_tensor(torch.ones(6), init_device_mesh("cpu", (2,)), [placement])
            with pytest.raises((RuntimeError, IndexError)):
                write(x)

    run_ranks(2, program)


@each(
    "call",
    [
        lambda x: x[torch.tensor([0, 1]), torch.tensor([1, -1, 0])],
        lambda x: torch.arange(36).view(6, 6)[torch.tensor([0, 1]), x.long()],
        lambda x: x[None, range(2), torch.tensor([1, -1, 0])],
        lambda x: x[False, torch.tensor([0, 1])],
        lambda x: _set(x, (torch.tensor([0, 1]), torch.tensor([1, -1, 0])), 1.0),
        lambda x: torch.masked_select(x, (x > 0).long()),
        lambda x: torch.masked_select(x, (x > 0).to(torch.uint8)),
        lambda x: torch.diagonal_scatter(x, torch.ones(1)),
        lambda x: torch.select_scatter(x, torch.ones(1), 0, 0),
        lambda x: torch.slice_scatter(x, torch.ones(1, 6), 0, 0, 2),
    ],
)
@each("placement", [Shard(0), Shard(1), Replicate()])
def test_shapes_and_masks_are_refused_in_torchs_words(
    call: Callable[[Any], Any], placement: Placement
) -> None:
    with pytest.raises((RuntimeError, IndexError)) as expected:
        call(A.clone())

    def program(rank: int) -> None:
        x = distribute_tensor(A, init_device_mesh("cpu", (2,)), [placement], src_data_rank=None)
        with pytest.raises(type(expected.value), match=f"^{re.escape(str(expected.value))}$"):
            call(x)

    run_ranks(2, program)


@each("rows", [4, 40_000])
@each(
    ("index", "value"),
    [
        (PAIR, torch.ones(2, 2, dtype=torch.float64)),
        (PAIR, torch.tensor(1.5, dtype=torch.float64)),
        ([0, 2], torch.ones(1, dtype=torch.int64)),
        ((slice(None), torch.tensor([0])), torch.ones(1) * 1j),
        (0, np.float32(2)),
        (PAIR, [1.0, 2.0]),
        (False, "no number"),
    ],
)
def test_values_of_other_dtypes_are_refused_in_torchs_words(
    index: Any, value: Any, rows: int
) -> None:
    full = torch.zeros(rows, 2)
    with pytest.raises((RuntimeError, TypeError)) as expected:
        full[index] = value

    def program(rank: int) -> None:
        x = distribute_tensor(full, init_device_mesh("cpu", (2,)), [Shard(0)], src_data_rank=None)
        with pytest.raises(type(expected.value), match=f"^{re.escape(str(expected.value))}$"):
            x[index] = value

    run_ranks(2, program)


@each("index", [True, torch.tensor(1), slice(1, 3), torch.arange(4) > 1])
def test_values_of_other_dtypes_are_cast_where_torch_does(index: Any) -> None:
    check_op(lambda x: _set(x, index, torch.tensor(1.5).double()), A, meshes=[(2,)], most=4)


def test_a_number_is_copied_to_one_place() -> None:
    check_op(lambda x: x.clone().index_copy_(0, torch.tensor([1]), torch.tensor(2.0)), LINE, most=6)


@each("shape", [(0, 4), (3, 4), (4,), ()])
@each("name", ["scatter", "scatter_add"])
def test_what_no_element_of_is_scattered_is_in_the_graph(name: str, shape: tuple[int, ...]) -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        layout = [Shard(0)] if shape else [Replicate()]
        x, values = (distribute_tensor(torch.ones(shape), mesh, layout) for _ in range(2))
        values.requires_grad_()
        nowhere = distribute_tensor(torch.empty(0, dtype=torch.long), mesh, [Replicate()])
        getattr(x, name)(0, nowhere, values).sum().backward()
        assert values.grad is not None
        assert torch.equal(values.grad.full_tensor(), torch.zeros(shape))

    run_ranks(2, body)


@each("lies", ["R", "S0", "S1"])
@each("target", ["v1", "v1[:, :0]"])
def test_what_no_element_of_is_scattered_is_a_write(target: str, lies: str) -> None:
    compare(
        f"v0 = leaf('v0', (4, 6), 1, '{lies}')\nv1 = v0.narrow(1, 3, 2)\nv2 = v1[:]\n"
        f"watch(v1, 'v1')\nv3 = torch.cat([v2, v2], 1)\n"
        f"with torch.no_grad(): {target}.scatter_(0, torch.tensor([]), 2.0)"
    )


def test_tensors_on_meta_are_indexed_as_in_torch() -> None:
    """The indices stay on the CPU, where ranks can look up which elements are local."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        plain = torch.empty(7, 6, device="meta")
        columns = distribute_tensor(plain, mesh, [Shard(1)])
        for index in ([3, 1, 0], torch.tensor([3, 1, 0]), torch.tensor([[3], [1]])):
            assert columns[index].shape == plain[index].shape
            rows = distribute_tensor(plain, mesh, [Shard(0)])
            rows[index] = 1.0
            assert rows.is_meta

    run_ranks(2, program)


@each("placement", [Replicate(), Shard(0), Shard(1)])
@each(
    "scatter",
    [
        lambda x, s: torch.select_scatter(x[:1].expand(3, 6), s[0, :1].expand(6), 0, -1),
        lambda x, s: torch.slice_scatter(x[:, :1].expand(4, 6), s[:1].repeat(4, 1), 1, 0, 2),
        lambda x, s: torch.diagonal_scatter(x[:, :1].expand(4, 6), s.view(-1)[:4]),
    ],
)
def test_scatters_to_what_is_expanded(
    scatter: Callable[[Any, Any], Any], placement: Placement
) -> None:
    source = -torch.ones(2, 2)
    expected = scatter(A, source)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(A, mesh, [placement])
        result = scatter(x, distribute_tensor(source, mesh, [Replicate()]))
        assert torch.equal(result.full_tensor(), expected)
        assert result.stride() == expected.stride()

    run_ranks(2, program)
