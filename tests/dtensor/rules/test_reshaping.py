"""Views, and what moves, repeats or drops elements, against plain torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.dtensor.op_checks import MESHES, Layout, check_op, count_op
from tests.dtensor.sharded_values import cut, full, same
from tests.fuzz.programs import compare
from tests.hypothesis_settings import examples
from tests.tables import each
from tilework.dtensor import (
    DTensor,
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
ROW = torch.ones(1, 3)
EMPTY = torch.zeros(0, 4)
POINT = torch.tensor(3.0)

#: torch's own, some of which have no types.
T: Any = torch

Case = tuple[Callable[..., Any], tuple[Tensor, ...]]

RESHAPING: dict[str, Case] = {
    "merge": (lambda x: x.view(24), (A,)),
    "split": (lambda x: x.reshape(2, 2, 6), (A,)),
    "split and merge": (lambda x: x.view(2, 12), (A,)),
    "factors in common": (lambda x: x.reshape(8, 3), (A,)),
    "no factors in common": (lambda x: x.reshape(6, 4), (torch.arange(24.0).reshape(8, 3),)),
    "sizes of 1": (lambda x: x.view(1, 4, 6, 1), (A,)),
    "inferred": (lambda x: x.reshape(-1, 3), (B,)),
    "without elements": (lambda x: x.reshape(4, 0), (EMPTY,)),
    "without elements, first kept": (lambda x: x.reshape(0, 5, 4), (EMPTY,)),
    "flatten": (lambda x: x.flatten(0, 1), (B,)),
    "flatten a point": (lambda x: x.flatten(), (POINT,)),
    "unflatten": (lambda x: x.unflatten(1, (2, -1)), (A,)),
    "ravel": (lambda x: x.ravel(), (A,)),
    "squeeze": (lambda x: x.squeeze(), (ROW,)),
    "squeeze a dim of one row each": (lambda x: x[:2].squeeze(0), (A,)),
    "squeeze dims": (lambda x: x.squeeze((0, 1)), (ROW,)),
    "unsqueeze": (lambda x: torch.unsqueeze(x, -2), (A,)),
    "permute": (lambda x: x.permute(2, 0, 1), (B,)),
    "transpose": (lambda x: x.transpose(0, -1), (B,)),
    "T": (lambda x: (x.T, x.mT, x.H), (A,)),
    "movedim": (lambda x: torch.movedim(x, (0, 1), (1, 0)), (B,)),
    "swapdims": (lambda x: x.swapdims(0, 1), (B,)),
    "expand": (lambda x: x.expand(2, 4, -1), (ROW,)),
    "broadcast_to": (lambda x: torch.broadcast_to(x, (2, 4, 6)), (A,)),
    "broadcast_tensors": (lambda x, y: T.broadcast_tensors(x, y), (A, A[0])),
    "as another": (lambda x, y: (x.view_as(y), x.reshape_as(y)), (A, A.reshape(2, 12))),
    "expand as another": (lambda x, y: x.expand_as(y), (ROW, torch.ones(2, 3))),
    "atleast": (lambda x, y: (T.atleast_2d(x, y), T.atleast_3d(y)), (POINT, LINE)),
    "in place": (lambda x: x.clone().t().mul_(2).unsqueeze(0), (A,)),
}

JOINING: dict[str, Case] = {
    "cat": (lambda x, y: torch.cat([x, y]), (A, A + 1)),
    "cat of other sizes": (lambda x, y: torch.cat([x, y], dim=1), (A, A[:, :3])),
    "cat of many": (lambda x, y, z: torch.cat((x, y, z), -1), (LINE, LINE + 1, LINE[:2])),
    "cat of dtypes": (lambda x, y: torch.cat((x, y)), (LINE, LINE.double())),
    "stack": (lambda x, y: torch.stack([x, y], -1), (A, A + 1)),
    "hstack": (lambda x, y: torch.hstack([x, y]), (A, A + 1)),
    "vstack": (lambda x, y: torch.vstack([x, y]), (LINE, LINE + 1)),
    "dstack": (lambda x, y: torch.dstack([x, y]), (A, A + 1)),
    "column_stack": (lambda x, y: torch.column_stack([x, y]), (LINE, LINE + 1)),
    "block_diag": (lambda x, y: T.block_diag(x, y), (A, ROW)),
    "kron": (lambda x, y: torch.kron(x, y), (A, ROW)),
    "cartesian_prod": (lambda x, y: T.cartesian_prod(x, y), (LINE, LINE)),
    "meshgrid": (lambda x, y: T.meshgrid(x, y, indexing="xy"), (LINE, LINE[:3])),
    "combinations": (lambda x: torch.combinations(x, 2), (LINE,)),
}

TAKING_APART: dict[str, Case] = {
    "split": (lambda x: x.split(2), (B,)),
    "split by sizes": (lambda x: T.split(x, [1, 3], 1), (B,)),
    "chunk": (lambda x: torch.chunk(x, 3, dim=0), (B,)),
    "tensor_split": (lambda x: (*x.tensor_split(3), *x.tensor_split((1, 2), dim=1)), (B,)),
    "tensor_split by a tensor": (lambda x: x.tensor_split(torch.tensor([1, 2])), (B,)),
    "hsplit": (lambda x: (*x.hsplit(2), *torch.vsplit(x, 2)), (A,)),
    "dsplit": (lambda x: torch.dsplit(x, (1,)), (B,)),
    "unbind": (lambda x: (*x.unbind(), *torch.unbind(x, 1)), (A,)),
    "iteration": (lambda x: list(x), (A,)),
    "narrow": (lambda x: (x.narrow(0, 1, 2), torch.narrow(x, 1, -3, 2)), (A,)),
    "select": (lambda x: (x.select(0, 1), x.select(-1, -2)), (A,)),
    "unfold": (lambda x: (x.unfold(0, 2, 1), x.unfold(1, 3, 2)), (A,)),
}

MOVING: dict[str, Case] = {
    "repeat": (lambda x: (x.repeat(2, 1, 3), x.repeat(1, 1)), (A,)),
    "tile": (lambda x: (x.tile(2), torch.tile(x, (2, 1))), (A,)),
    "repeat_interleave": (lambda x: x.repeat_interleave(3, dim=1), (A,)),
    "repeat_interleave each": (
        lambda x: x.repeat_interleave(torch.tensor([1, 0, 2, 1]), dim=0),
        (A,),
    ),
    "pad": (lambda x: F.pad(x, (1, 2, 3, 0, 0, 2), value=2.5), (B,)),
    "pad with zeros": (lambda x: F.pad(x, (1, 2)), (A,)),
    "crop": (lambda x: F.pad(x, (-1, 2, 1, -2)), (B,)),
    "pad with a complex number": (
        lambda x: torch.constant_pad_nd(x + 0j, (1, 2, 0, 1), 2 + 1j),
        (A,),
    ),
    "crop and pad with it": (lambda x: torch.constant_pad_nd(x + 0j, (-1, 2), 2 + 1j), (A,)),
    "pad by reflection": (lambda x: F.pad(x, (1, 1, 2, 1), mode="reflect"), (B,)),
    "pad by repetition": (lambda x: F.pad(x, (1, 2), mode="replicate"), (B,)),
    "pad around": (lambda x: F.pad(x, (1, 2), mode="circular"), (B,)),
    "roll": (lambda x: torch.roll(x, (1, -2), (0, 1)), (A,)),
    "roll all": (lambda x: x.roll(5), (A,)),
    "roll of nothing": (lambda x: x.roll(1, 7), (torch.zeros(2, 0),)),
    "flip": (lambda x: (torch.flip(x, (0, 1)), x.fliplr(), x.flipud()), (A,)),
    "rot90": (lambda x: [torch.rot90(x, k) for k in range(4)], (A,)),
    "tril": (lambda x: [x.tril(k) for k in (-2, 0, 3)], (B,)),
    "triu": (lambda x: [torch.triu(x, diagonal=k) for k in (-2, 0, 3)], (A,)),
    "diagonal": (lambda x: [x.diagonal(k) for k in (-2, 0, 3)], (A,)),
    "diagonal of others": (lambda x: x.diagonal(1, 2, 0), (B,)),
    "diag": (lambda x, y: (torch.diag(x, 1), torch.diag(y, -1)), (A, LINE)),
    "diag_embed": (lambda x: (torch.diag_embed(x, 1), torch.diag_embed(x, -1, 0, 2)), (A,)),
}

CASES = RESHAPING | JOINING | TAKING_APART | MOVING


@each("name", CASES)
def test_it_is_what_plain_torch_gives(name: str) -> None:
    fn, args = CASES[name]
    mesh = MESHES[sum(map(ord, name)) % len(MESHES)]
    check_op(fn, *args, meshes=[mesh], most=3, gathers=False)


def test_other_dtypes_of_the_same_bytes() -> None:
    for dtype in (torch.int32, torch.float64, torch.int16):
        check_op(lambda x, d=dtype: x.view(d), A, most=5, grads=False, partial=(), gathers=False)


@examples(15)
@given(st.data())
def test_any_reshape(data: st.DataObject) -> None:
    """Sizes with and without factors in common, and of 1; then cut in any way."""
    primes = data.draw(st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=1, max_size=4))
    total = math.prod(primes)
    old = _grouped(data, primes)
    new = _grouped(data, data.draw(st.permutations(primes)))
    mesh = data.draw(st.sampled_from([(2,), (2, 2)]))
    seed = data.draw(st.integers(0, 99))
    check_op(
        lambda x: x.reshape(new) * 2,
        torch.arange(float(total)).reshape(old),
        meshes=[mesh],
        most=2,
        seed=seed,
        gathers=False,
    )


def _grouped(data: st.DataObject, sizes: list[int]) -> tuple[int, ...]:
    """Neighbouring sizes merged in some way."""
    found = [sizes[0]]
    for size in sizes[1:]:
        if data.draw(st.booleans()):
            found[-1] *= size
        else:
            found.append(size)
    return tuple(found)


def test_two_axes_on_a_dim_that_is_split() -> None:
    """Values and gradients, in both orders of the axes."""
    layouts = [
        [Layout((Shard(0), Shard(0)))],
        [Layout((Shard(0), Shard(0)), (1, 0))],
        [Layout((Shard(1), Shard(0)))],
    ]
    for shape in [(2, 6, 3), (4, 3, 3), (3, 4, 3)]:
        check_op(
            lambda x, s=shape: (x.reshape(s) * x.reshape(s)).sum(1),
            torch.arange(36.0).reshape(12, 3),
            meshes=[(2, 2)],
            layouts=lambda _: layouts,
        )


# -- what moves ------------------------------------------------------------------------------


@each(
    "fn",
    [
        lambda x: x[1:5],
        lambda x: x[::3],
        lambda x: x[5:2],
        lambda x: x[:, 1],
        lambda x: x.narrow(0, 2, 4),
        lambda x: x.chunk(3),
        lambda x: x.view(4, 2, 4),
        lambda x: x.flatten(),
        lambda x: x.t(),
        lambda x: x[None].expand(3, -1, -1),
        lambda x: F.pad(x, (0, 0, 1, 2)),
        lambda x: torch.stack([x, x]),
        lambda x: torch.cat([x, x], 1),
        lambda x: x.tril(),
        lambda x: x.diagonal(),
        lambda x: x.repeat_interleave(2, 0),
    ],
)
def test_nothing_moves(fn: Callable[[Tensor], Any]) -> None:
    seen = count_op(fn, torch.arange(32.0).reshape(8, 4), layouts=[[Shard(0)]])
    assert seen.forward == seen.backward == seen.gathered == []


def test_cat_along_a_cut_dim_moves_each_tensor_once() -> None:
    seen = count_op(lambda x, y: torch.cat([x, y]), A, A + 1, layouts=[[Shard(0)], [Shard(0)]])
    assert len(seen.forward) == len(seen.backward) == 2
    assert seen.placements == [(Shard(0),)]


def test_a_slice_of_a_cut_dim_stays_where_it_is() -> None:
    def program(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(A, mesh, [Shard(0)], src_data_rank=None)
        rows: Any = x[1:]
        row: Any = x[3]
        return rows.placements, rows.to_local(), row.placements

    a, b = run_ranks(2, program)
    assert a[0] == b[0] == (Shard(0, sizes=(1, 2)),)
    assert torch.equal(torch.cat([a[1], b[1]]), A[1:])
    assert a[2] == (Replicate(),)


# -- memory ----------------------------------------------------------------------------------

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(24),
    "view that moves": lambda x: x.view(3, 8),
    "element of a dim": lambda x: x[1],
    "range with steps": lambda x: x[:, ::2],
    "transposed": lambda x: x.t(),
    "one of unbind": lambda x: x.unbind(1)[2],
    "one of chunks": lambda x: x.chunk(2, 1)[1],
    "copy in torch too": lambda x: x.t().reshape(2, 12),
    "diagonal": lambda x: x.diagonal(1),
    "unfold": lambda x: x.unfold(1, 2, 2),
    "view of a view": lambda x: x.view(2, 12)[1].view(3, 4)[:, 1:3],
    "detached": lambda x: x.view(3, 8).detach(),
}


@each("name", VIEWS)
def test_views_share_memory(name: str) -> None:
    """What is written to a view reaches the tensor, and the other way."""
    view = VIEWS[name]

    def to_view(x: Tensor) -> Any:
        y = x.clone()
        made = view(y)
        made.mul_(2)
        made[..., 0] = 5.0
        return y, made, y.view(-1) * 2

    def to_base(x: Tensor) -> Any:
        y = x.clone()
        y.mul_(2)
        y[1] = 3.0
        made = view(y)
        return made[..., 0] + 1, made, y

    for fn in (to_view, to_base):
        # Torch refuses gradients where one of several results is written to.
        grads = not name.startswith("one of")
        check_op(fn, A, meshes=[(2, 2)], most=5, seed=len(name), grads=grads)


def test_copies_in_torch_share_no_memory_where_a_shard_could_be_viewed() -> None:
    def program(rank: int) -> None:
        x = cut(torch.arange(6.0).view(3, 2).t(), init_device_mesh("cpu", (2,)), [Shard(0)])
        before = x.full_tensor()
        x.reshape(6).add_(1)
        assert torch.equal(x.full_tensor(), before)

    run_ranks(2, program)


def test_a_view_that_moved_of_a_parameter_cannot_be_written_to() -> None:
    def program(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(A, mesh, [Shard(0)], src_data_rank=None).requires_grad_()
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            x[1].add_(1)
        with torch.no_grad():
            x[1].add_(1)
        assert isinstance(x, DTensor)
        return str(x.full_tensor()[1, 0].item())

    assert run_ranks(2, program) == ["7.0", "7.0"]


GRID = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


def test_what_was_flattened_splits_again() -> None:
    """pytorch#179509: views that split merged dims, with gradients."""

    def views(x: Tensor) -> list[Tensor]:
        flat = x.flatten()
        return [
            *(flat.view(6, 4), flat.view(2, 2, 6), flat.view(4, 2, 3), flat.unflatten(0, (3, 8))),  # type: ignore[no-untyped-call]
            *(x.view(2, 12), x.reshape(8, 3).t(), x.view(2, 2, 6).flatten(1), x.view(-1, 1, 2)),
            x.view(2, 2, 3, 2).permute(2, 0, 3, 1).flatten(2).flatten(0, 1).view(3, 2, 4),
        ]

    check_op(views, GRID, meshes=((2,), (2, 2)), most=16)


def test_gradients_through_a_dim_that_is_cut_twice_and_unflattened() -> None:
    """pytorch#186282: two axes of the mesh on the parts of one dim."""

    def heads(x: Tensor, w: Tensor) -> Tensor:
        split = (x @ w).unflatten(1, (4, 2))  # type: ignore[no-untyped-call]
        return torch.einsum("bhd,bhe->hde", split, split.softmax(2)).flatten(0, 1)

    def layouts(shape: tuple[int, ...]) -> list[list[Layout]]:
        both = [Layout((Shard(1), Shard(1)), order) for order in (None, (1, 0))]
        rows = Layout((Shard(0), Shard(0)))
        return [[x, w] for x in (rows, Layout((Replicate(), Shard(1)))) for w in (*both, rows)]

    check_op(heads, torch.randn(4, 6), torch.randn(6, 8), meshes=((2, 2),), layouts=layouts)


EVERY_PLACEMENT: list[Placement] = [Replicate(), Shard(0), Shard(1)]


def test_slices_are_initialised_in_place() -> None:
    """pytorch#139735: ``weight[index].zero_()`` and its like reach the tensor."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        for placements in itertools.product(EVERY_PLACEMENT, repeat=2):
            plain, x = GRID.clone(), cut(GRID, mesh, placements)
            for one in (plain, x):
                one[1].zero_()
                one[2:, 3].fill_(7)
                one[-1, 1:4] += 1
                one[:, 0] = torch.arange(4.0)
                nn.init.constant_(one[0, 4:], 5)
                one.narrow(0, 1, 2).mul_(2)
            same(x, plain)
        embedding = nn.Embedding(5, 4, padding_idx=2)
        embedding.weight = nn.Parameter(cut(embedding.weight, mesh, [Shard(0), Shard(1)]))
        embedding.reset_parameters()
        assert not full(embedding.weight)[2].any()
        assert full(embedding.weight)[3].all()

    run_ranks(4, program)


@each("widths", [(-1, -1), (-2, 1), (0, -2)])
@each("lies", ["R", "S0", "P"])
def test_no_more_is_cropped_than_there_is(widths: tuple[int, int], lies: str) -> None:
    compare(f"v0 = data((1,), 1, '{lies}')\nrefused: functional.pad(v0, {widths})")
