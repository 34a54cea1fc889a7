"""What tests of operators share: cuts of one tensor, and the comparison with the plain operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.rounding import assert_close
from tests.sharded.ranks_and_specs import boxes, chunks, cut, grid, on
from tilework.layout import Box
from tilework.sharded import ShardedTensor, ShardingSpec

RANKS = 3
SIZE = (5, 4)

#: Ways to cut a tensor of 5 x 4.
CUTS: Mapping[str, ShardingSpec] = {
    "rows": chunks(0, [0, 1, 2]),
    "columns, two each, none on rank 1": chunks(1, [2, 0, 0, 2]),
    "all on rank 1": chunks(0, [1]),
    "empty rows": chunks(0, [0, 0, 1, 1, 2, 1, 0]),
    "grid": grid([3, 2], [1, 3], [0, 1]),
    "irregular": boxes(((0, 0), (5, 1), 2), ((3, 1), (2, 3), 0), ((0, 1), (3, 3), 2)),
}
#: Dims that no tile of a cut lacks a part of.
WHOLE_DIMS = {
    "rows": {1},
    "columns, two each, none on rank 1": {0},
    "all on rank 1": {0, 1},
    "empty rows": {1},
    "grid": set(),
    "irregular": set(),
}


def values(*size: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same random numbers on every rank, some of them equal."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(size, generator=generator, dtype=torch.float64) * 3
    if found.numel() > 7:
        found.view(-1)[[1, 7]] = found.abs().max() + 1
    return found.to(dtype)


def shards_of(whole: Tensor, spec: ShardingSpec, rank: int) -> ShardedTensor:
    """``whole``, cut; needs a gradient if ``whole`` does."""
    made = cut(whole.detach(), spec, rank)
    if whole.requires_grad:
        made.requires_grad_()
    return made


def plain(value: Any) -> Any:
    """A result as plain tensors. Collective."""
    if isinstance(value, ShardedTensor):
        return value.full_tensor().detach()
    if isinstance(value, tuple | list):
        return [plain(part) for part in value]
    return value.detach() if isinstance(value, Tensor) else value


def check_same(
    rank: int,
    compute: Callable[..., Any],
    wholes: list[Tensor],
    spec: ShardingSpec,
) -> Any:
    """``compute`` gives the same of sharded tensors as of plain ones, gradients too."""
    sharded = [shards_of(whole, spec, rank) for whole in wholes]
    wholes = [whole.clone().detach().requires_grad_(whole.requires_grad) for whole in wholes]
    expected, found = compute(*wholes), compute(*sharded)
    compare(found, expected)
    gradients = [whole for whole in wholes if whole.requires_grad]
    if gradients and _flat(expected)[0].requires_grad:
        torch.autograd.backward(_weighted(expected))
        torch.autograd.backward(_weighted(found))
        for whole, tensor in zip(wholes, sharded, strict=True):
            if whole.grad is None:
                assert tensor.grad is None
            else:
                assert isinstance(tensor.grad, ShardedTensor)
                assert _boxes(tensor.grad) == _boxes(tensor)
                close_tiles(tensor.grad, whole.grad)
    return found


def check_cuts(compute: Callable[..., Any], wholes: list[Tensor]) -> None:
    """:func:`check_same` for all cuts, which are those of the first and second dim."""

    def program(rank: int) -> list[Any]:
        found = []
        for name, spec in CUTS.items():
            try:
                found += _metadata(check_same(rank, compute, wholes, spec))
            except Exception as error:
                raise AssertionError(f"cut: {name}") from error
        return found

    _equal(on(RANKS, program))


def check_cut(
    compute: Callable[..., Any], wholes: list[Tensor], spec: ShardingSpec, ranks: int = RANKS
) -> None:
    """:func:`check_same` for one cut."""
    _equal(on(ranks, lambda rank: _metadata(check_same(rank, compute, wholes, spec))))


def _metadata(value: Any) -> list[Any]:
    return [one.metadata() for one in _flat(value) if isinstance(one, ShardedTensor)]


def _equal(by_rank: list[Any]) -> None:
    """All ranks know the same of the results: values do not tell, each compares its own tiles."""
    assert all(found == by_rank[0] for found in by_rank), f"ranks differ: {by_rank}"


def compare(found: Any, expected: Any) -> None:
    """Values, and what is known of them without values."""
    for one, two in zip(_flat(found), _flat(expected), strict=True):
        assert (one.shape, one.dtype) == (two.shape, two.dtype)
        assert one.requires_grad == two.requires_grad
        assert one.is_leaf == two.is_leaf
        if isinstance(one, ShardedTensor):
            properties = one.metadata().tensor_properties
            assert properties.dtype == two.dtype
            assert properties.requires_grad == two.requires_grad
            assert all(tile.requires_grad == two.requires_grad for tile in one.local_tiles())
            sizes = [tuple(tile.shape) for tile in one.local_tiles()]
            assert sizes == [tuple(s.metadata.shard_sizes) for s in one.local_shards()]
            close_tiles(one, two)
        else:
            close(plain(one), two.detach())


def close_tiles(found: ShardedTensor, whole: Tensor) -> None:
    """A sharded tensor has the value of a plain one; each rank compares its own tiles, locally."""
    assert sum(box.volume for box in _boxes(found)) == whole.numel()
    for shard in found.local_shards():
        assert shard.metadata in found.metadata().shards_metadata
        close(shard.tensor.detach(), whole.detach()[shard.metadata.box.slices])


def _boxes(tensor: ShardedTensor) -> list[Box]:
    return [metadata.box for metadata in tensor.metadata().shards_metadata]


def close(one: Tensor, two: Tensor) -> None:
    assert_close(one, two, equal_nan=True)


def _flat(value: Any) -> list[Any]:
    return [value] if isinstance(value, Tensor) else list(value)


def _weighted(value: Any) -> Tensor:
    """One number of a result, to which its elements contribute differently."""
    found = [(part * part).sum() for part in _flat(value) if part.requires_grad]
    return torch.stack(found).sum()
