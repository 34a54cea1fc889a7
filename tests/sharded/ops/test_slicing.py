"""Views and indexing, joining: against the plain ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as hs

from tests.sharded.ops.op_checks import (
    CUTS,
    RANKS,
    SIZE,
    check_cut,
    check_cuts,
    check_same,
    shards_of,
    values,
)
from tests.sharded.ranks_and_specs import check_all_raise, chunks, examples, grid, on, specs
from tests.tables import each
from tilework.sharded import ChunkShardingSpec, EnumerableShardingSpec, ShardedTensor

_ANY_CUT: dict[str, Callable[[Any], Any]] = {
    "T": lambda x: x.T,
    "mT": lambda x: x.mT,
    "t": lambda x: torch.t(x),
    "transpose": lambda x: x.transpose(0, -1),
    "permute": lambda x: x.permute(1, 0),
    "movedim": lambda x: torch.movedim(x, 0, 1),
    "narrow": lambda x: x.narrow(0, 1, 3),
    "narrow from the end": lambda x: torch.narrow(x, 1, -2, 2),
    "narrow to nothing": lambda x: x.narrow(0, 2, 0),
    "select": lambda x: x.select(0, -1),
    "row": lambda x: x[2],
    "element": lambda x: x[2, 1],
    "slices": lambda x: x[1:4, ::1],
    "slices past the end": lambda x: x[3:99, -2:],
    "ellipsis": lambda x: x[..., 1],
    "new dim": lambda x: x[:, None, 1:],
    "empty slice": lambda x: x[3:1],
    "unsqueeze": lambda x: x.unsqueeze(-1),
    "squeeze": lambda x: x[:, None].squeeze(),
    "squeeze no dim": lambda x: x[:, None].squeeze(()),
    "squeeze a dim": lambda x: x[None, :, None].squeeze(0),
    "unbind": lambda x: x.unbind(1),
    "iteration": lambda x: list(x),
    "chunk": lambda x: x.chunk(2),
    "split": lambda x: torch.split(x, [1, 3], dim=1),
    "split by size": lambda x: x.split(2),
    "tensor_split": lambda x: x.tensor_split(3, dim=-1),
    "expand": lambda x: x.unsqueeze(1).expand(5, 3, 4),
    "expand by dims": lambda x: x.expand(2, -1, -1),
    "split rows": lambda x: x.unflatten(1, (2, 2)) if x.shape[1] == 4 else x,
    "slice, then all else": lambda x: (x[1:4] * 2).relu().sum(),
    "stack": lambda x: torch.stack([x, x * 2], 1),
    "same shape": lambda x: x.view(5, 4),
    "view of the bytes": lambda x: x.detach().view(torch.int16),
}


@each("compute", _ANY_CUT.values())
def test_views(compute: Callable[[Any], Any]) -> None:
    if compute is _ANY_CUT["split rows"]:
        check_cut(compute, [values(*SIZE)], CUTS["rows"])
    else:
        check_cuts(compute, [values(*SIZE).requires_grad_()])


_BY_ROWS: dict[str, Callable[[Any], Any]] = {
    "flatten": lambda x: x.flatten(),
    "ravel": lambda x: torch.ravel(x),
    "view": lambda x: x.view(5, 2, 2),
    "reshape": lambda x: torch.reshape(x, (-1, 1, 4)),
    "rows into rows": lambda x: x.view(10, 2),
    "cat": lambda x: torch.cat([x, x * 2, x[:, :1]], -1),
}


@each("compute", _BY_ROWS.values())
def test_views_of_whole_rows(compute: Callable[[Any], Any]) -> None:
    def program(rank: int) -> None:
        for name in ("rows", "empty rows", "all on rank 1"):
            check_same(rank, compute, [values(*SIZE).requires_grad_()], CUTS[name])

    on(RANKS, program)


@examples(25)
@given(hs.data())
def test_any_index_of_any_cut(data: hs.DataObject) -> None:
    size = data.draw(hs.sampled_from([(6,), (5, 3), (2, 3, 4)]))
    spec = data.draw(specs(size, (0, 1, 2)))
    key: list[Any] = []
    for extent in size:
        ends = hs.one_of(hs.none(), hs.integers(-extent - 1, extent + 1))
        kinds = hs.integers(-extent, extent - 1), hs.builds(slice, ends, ends), hs.none()
        key.append(data.draw(hs.one_of(*kinds)))
    whole = values(*size).requires_grad_()
    check_cut(lambda x: x[tuple(key)], [whole], spec)


@examples(25)
@given(hs.data())
def test_any_shape_of_any_cut_is_right_or_refused(data: hs.DataObject) -> None:
    shapes = [(24,), (4, 6), (2, 3, 4), (1, 24), (8, 1, 3), (2, 2, 6), (24, 1), (12, 2)]
    size, other = data.draw(hs.sampled_from(shapes)), data.draw(hs.sampled_from(shapes))
    spec = data.draw(specs(size, (0, 1, 2)))
    whole = values(*size).requires_grad_()

    def program(rank: int) -> bool:
        try:
            shards_of(whole, spec, rank).reshape(other)
        except RuntimeError as error:
            return str(error).endswith("not supported for ShardedTensor!")
        check_same(rank, lambda x: x.reshape(other), [whole], spec)
        return True

    assert on(RANKS, program) == [True] * RANKS


def test_a_view_shares_the_shards_memory() -> None:
    def program(rank: int) -> None:
        for name in ("rows", "grid", "irregular", "columns, two each, none on rank 1"):
            tensor, plain = shards_of(values(*SIZE), CUTS[name], rank), values(*SIZE)
            for x in (tensor, plain):
                x[1:3].zero_()
                x.T[0].fill_(7)
                x[4, 1:] = 5
                x[:, 2] = x[:, 2] * 2
                x[x < 0] = 9
                x[0] = torch.tensor(3.0)
            assert torch.equal(tensor.full_tensor(), plain)

    on(RANKS, program)


def test_specs_of_results() -> None:
    def program(rank: int) -> None:
        tensor: Any = shards_of(values(*SIZE), CUTS["rows"], rank)
        assert tensor.T.sharding_spec() == chunks(1, [0, 1, 2])
        assert tensor.unsqueeze(0).sharding_spec() == chunks(1, [0, 1, 2])
        assert tensor[:, 1].sharding_spec() == chunks(0, [0, 1, 2])
        part = tensor[1:]
        assert isinstance(part.sharding_spec(), EnumerableShardingSpec)
        assert [s.shard_sizes for s in part.metadata().shards_metadata] == [(1, 4), (2, 4), (1, 4)]
        assert isinstance(tensor[:4].sharding_spec(), ChunkShardingSpec | EnumerableShardingSpec)
        assert [s.metadata for s in part.local_shards()] == [part.metadata().shards_metadata[rank]]
        assert part.reshard(chunks(1, [2])).size() == (4, 4)

    on(RANKS, program)


@each(
    "compute",
    [
        lambda x: x[::2],
        lambda x: x[torch.tensor([0])],
        lambda x: x[[0, 1]],
        lambda x: x[x > 0],
        lambda x: x.flatten(),
        lambda x: x.expand(5, 4).roll(1),
        lambda x: torch.cat([x, x]),
        lambda x: torch.cat([x, torch.ones(5, 4)]),
        lambda x: x.as_strided((2,), (1,)),
        lambda x: x.__setitem__(0, torch.ones(4)),
        lambda x: x.__setitem__(0, torch.tensor(1.0, requires_grad=True)),
    ],
)
def test_what_no_layout_can_say_raises(compute: Callable[[Any], Any]) -> None:
    check_all_raise(
        2,
        lambda rank: compute(shards_of(values(*SIZE), grid([2, 3], [2, 2], [0, 1]), rank)),
        RuntimeError,
        "not supported for ShardedTensor!$",
    )


@each(
    "compute",
    [
        lambda x: x[5],
        lambda x: x[0, 0, 0],
        lambda x: x.select(2, 0),
        lambda x: x.unsqueeze(4),
        lambda x: x.transpose(0, 2),
    ],
)
def test_indices_out_of_range(compute: Callable[[Any], Any]) -> None:
    def program(rank: int) -> ShardedTensor:
        result: ShardedTensor = compute(shards_of(values(*SIZE), chunks(0, [1]), rank))
        return result

    check_all_raise(2, program, IndexError, "range|too many|out of bounds")
