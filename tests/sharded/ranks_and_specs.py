"""What tests of sharded tensors share: ranks, cuts of all kinds, and values to compare with."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from hypothesis import strategies as hs
from torch import Tensor

from tests.hypothesis_settings import examples as examples
from tilework.sharded import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    Shard,
    ShardedTensor,
    ShardingSpec,
    ShardMetadata,
    init_from_local_shards,
)
from tilework.testing import run_ranks

LIMIT = timedelta(seconds=120)


def on(n: int, program: Callable[[int], Any]) -> list[Any]:
    """What each of ``n`` ranks, which are threads, returns."""
    return run_ranks(n, program, timeout=LIMIT)


def errors_of(n: int, program: Callable[[int], Any]) -> list[BaseException | None]:
    """What each rank raises. Nobody is aborted because another raised, so nobody may wait."""

    def attempt(rank: int) -> BaseException | None:
        try:
            program(rank)
        except Exception as error:
            return error
        return None

    return on(n, attempt)


def check_all_raise(
    n: int, program: Callable[[int], Any], kind: type[Exception], pattern: str
) -> list[str]:
    """All ranks raise ``kind`` with a message that has ``pattern``; the messages."""
    errors = errors_of(n, program)
    for rank, error in enumerate(errors):
        assert isinstance(error, kind), f"rank {rank} raised {error!r}"
        assert re.search(pattern, str(error)), f"rank {rank}: {error}"
    return [str(error) for error in errors]


def chunks(dim: int, ranks: Sequence[int], device: str = "cpu") -> ChunkShardingSpec:
    """Chunks along ``dim``, in this order of ranks."""
    return ChunkShardingSpec(dim, [f"rank:{rank}/{device}" for rank in ranks])


def boxes(*parts: tuple[Sequence[int], Sequence[int], int]) -> EnumerableShardingSpec:
    """Boxes of (offsets, sizes, rank)."""
    return EnumerableShardingSpec(
        [ShardMetadata(offsets, sizes, f"rank:{rank}/cpu") for offsets, sizes, rank in parts]
    )


def grid(rows: Sequence[int], columns: Sequence[int], ranks: Sequence[int]) -> ShardingSpec:
    """Rows times columns of these sizes; ``ranks`` are taken in turn."""
    parts: list[tuple[Sequence[int], Sequence[int], int]] = []
    row = 0
    for height in rows:
        column = 0
        for width in columns:
            parts.append(((row, column), (height, width), ranks[len(parts) % len(ranks)]))
            column += width
        row += height
    return boxes(*parts)


def numbered(size: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """A plain tensor in which every element is another one."""
    return torch.arange(torch.Size(size).numel()).reshape(tuple(size)).to(dtype)


def cut(whole: Tensor, spec: ShardingSpec, rank: int, **options: Any) -> ShardedTensor:
    """``whole``, which every rank has, cut by ``spec``; without communication."""

    def fill(shard: Shard) -> None:
        shard.tensor.copy_(whole[shard.metadata.box.slices])

    return ShardedTensor(spec, whole.shape, dtype=whole.dtype, fill=fill, **options)


def join(parts: Sequence[tuple[ShardMetadata, Tensor]], size: Sequence[int]) -> Tensor:
    """The plain tensor of which these are all shards."""
    dtype = parts[0][1].dtype
    made = torch.zeros(tuple(size), dtype=dtype)
    for shard, tensor in parts:
        made[shard.box.slices] = tensor.detach()
    return made


def parts_of(tensor: ShardedTensor) -> list[tuple[ShardMetadata, Tensor]]:
    """This rank's shards, to be joined with those of the others."""
    return [(shard.metadata, shard.tensor) for shard in tensor.local_shards()]


def quarter(rank: int, **options: Any) -> Shard:
    """One of the four 5 x 5 quarters of a 10 x 10 tensor."""
    place = ShardMetadata([rank // 2 * 5, rank % 2 * 5], [5, 5], f"rank:{rank}/cpu")
    return Shard(torch.full((5, 5), float(rank), **options), place)


def of_quarters(rank: int, **options: Any) -> ShardedTensor:
    """The tensor of these quarters; on four ranks."""
    return init_from_local_shards([quarter(rank)], [10, 10], **options)


# -- hypothesis --------------------------------------------------------------------------------


@hs.composite
def specs(draw: hs.DrawFn, size: tuple[int, ...], ranks: tuple[int, ...]) -> ShardingSpec:
    """Chunks along any dim or random boxes, on any of these ranks, several times or not at all."""
    several = hs.lists(hs.sampled_from(ranks), min_size=1, max_size=6)
    if draw(hs.booleans()):
        return chunks(draw(hs.integers(-len(size), len(size) - 1)), draw(several))
    found = draw(_cuts(tuple(0 for _ in size), size, 3))
    return boxes(*[(offsets, sizes, draw(hs.sampled_from(ranks))) for offsets, sizes in found])


@hs.composite
def _cuts(
    draw: hs.DrawFn, offsets: tuple[int, ...], sizes: tuple[int, ...], depth: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut in two at random places, which may be the ends, a few times."""
    if depth == 0 or draw(hs.booleans()):
        return [(offsets, sizes)]
    dim = draw(hs.integers(0, len(sizes) - 1))
    at = draw(hs.integers(0, sizes[dim]))
    beyond = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
    before = (*sizes[:dim], at, *sizes[dim + 1 :])
    after = (*sizes[:dim], sizes[dim] - at, *sizes[dim + 1 :])
    return [*draw(_cuts(offsets, before, depth - 1)), *draw(_cuts(beyond, after, depth - 1))]
