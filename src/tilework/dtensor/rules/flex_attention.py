"""``flex_attention`` where ranks share queries: only the blocks of keys that a rank needs are sent.

The operator runs on local queries, and on the keys that the block mask lists for them. The
program's own functions get global indices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from tilework.comm.functional.internal import all_to_all_single
from tilework.comm.per_call.internal import awaited
from tilework.dtensor.autograd.local_graph import local_of
from tilework.dtensor.debug import causes
from tilework.dtensor.dispatch.results import replicated
from tilework.dtensor.propagation.dtensor_call import Args, Kwargs
from tilework.dtensor.rules.attention_blocks import KeyPattern, Range, Ranges, count, local_slices
from tilework.dtensor.rules.attention_ways import part_of, sequence_axes
from tilework.dtensor.rules.ring_attention import AttentionPart, Holders
from tilework.dtensor.spec import spec_of
from tilework.dtensor.tensor import DTensor, empty_local, wrap
from tilework.layout import Placement, Replicate, Shard
from tilework.tiled import dtensor_handler

_NAMES = (
    *("query", "key", "value", "score_mod", "block_mask", "scale", "kernel_options"),
    *("score_mod_other_buffers", "mask_mod_other_buffers"),
)
#: Numbers and indices of blocks in a block mask: of those that are masked in part, and of others.
_LISTS = ((2, 3), (4, 5))


@dtensor_handler("flex_attention")
def _flex_attention(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """The result, logarithms of sums of weights, and greatest scores, laid out as the query."""
    given: dict[str, Any] = {**dict(zip(_NAMES, args, strict=False)), **kwargs}
    tensors = [given[name] for name in _NAMES[:3]]
    mesh = next(x for x in tensors if isinstance(x, DTensor)).device_mesh
    query, key, value = _laid_out(
        [x if isinstance(x, DTensor) else replicated(x, mesh) for x in tensors]
    )
    widths = (value.shape[3:], (), ())
    if not mesh.here:
        return tuple([_wrapped(empty_local(query), query, width) for width in widths])
    axes = sequence_axes(query._spec, key._spec, value._spec)
    part = part_of((query._spec, key._spec), axes, KeyPattern(), 1.0)
    needed = _needed(part, given["block_mask"])
    local = (local_of(query), *[_arrived(local_of(x), part, needed) for x in (key, value)])
    positions = needed[part.holders.me]
    if 0 in local[0].shape or 0 in local[1].shape:
        results = _nothing(local[0], widths[0])
    else:
        rows, columns = (_indices(each, local[0].device) for each in (part.queries, positions))
        given = _shown(given, query._spec.local_boxes[0].offsets[:2], rows, columns)
        results = func(*local, *[given[name] for name in _NAMES[3:] if name in given])
    return tuple([_wrapped(x, query, width) for x, width in zip(results, widths, strict=True)])


def _nothing(query: Tensor, width: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The results of queries that attend to no key."""
    logs = query.new_full(query.shape[:3], -torch.inf)
    return query.new_zeros(*query.shape[:3], *width), logs, logs.clone()


def _wrapped(local: Tensor, query: DTensor, width: Sequence[int]) -> Tensor:
    spec = query._spec
    shape = (*spec.shape[:3], *width)
    return wrap(local, spec_of(spec.mesh, spec.placements, shape, spec.order))


def _laid_out(tensors: Sequence[DTensor]) -> list[DTensor]:
    """Query, key and value in layouts in which no two ranks compute one result. Collective."""
    query = tensors[0]
    sizes = [{x.size(dim) for x in tensors} for dim in range(3)]
    wanted: list[Placement] = []
    for length, placement in zip(query.device_mesh.shape, query.placements, strict=True):
        dim = placement.dim if isinstance(placement, Shard) else 3
        heads = dim == 1 and Shard(1) not in wanted and not any(n % length for n in sizes[1])
        fits = heads or (dim in (0, 2) and len(sizes[dim]) == 1)
        wanted.append(Shard(dim) if fits else Replicate())
    return [x.redistribute(placements=wanted) for x in tensors]


# -- keys that are needed --------------------------------------------------------------------


def _needed(part: AttentionPart, mask: tuple[Any, ...]) -> tuple[Ranges, ...]:
    """The keys that each rank's queries attend to, by the lists of blocks in the mask. Local."""
    q_size, k_size = mask[-3], mask[-2]
    length = sum(map(count, part.holders.held))

    def blocks(rows: Range) -> set[int]:
        found: set[int] = set()
        for numbers, indices in _LISTS:
            if mask[numbers] is not None and rows[0] < rows[1]:
                lines = slice(rows[0] // q_size, -(-rows[1] // q_size))
                used, listed = mask[numbers][:, :, lines, None], mask[indices][:, :, lines]
                places = torch.arange(listed.shape[-1], device=listed.device)
                found.update(listed[(places < used).expand_as(listed)].tolist())
        return found

    needed = []
    # Where several ranks have queries, these lie as the keys.
    for ranges in (part.queries,) if part.group is None else part.holders.held:
        numbers = sorted(set[int]().union(*map(blocks, ranges)))
        spans = [(n * k_size, min((n + 1) * k_size, length)) for n in numbers]
        needed.append(tuple([span for span in spans if span[0] < span[1]]))
    return tuple(needed)


def _rows(x: Tensor, held: Ranges, wanted: Ranges) -> Tensor:
    """The wanted rows of those that a rank holds, one after the other."""
    parts = [x[:, :, rows] for rows in local_slices(held, wanted)]
    return torch.cat([x[:, :, :0], *parts], 2)


def _arrived(x: Tensor, part: AttentionPart, needed: tuple[Ranges, ...]) -> Tensor:
    """The rows that this rank needs, ascending. Collective over the group; differentiable."""
    if part.group is None:
        return _rows(x, part.holders.held[0], needed[0])
    assert part.specs is not None
    holders = Holders(part.holders.me, part.holders.held, needed)
    ranks = range(len(needed))
    sent = [holders.between(holders.me, rank) for rank in ranks]
    came = [holders.between(rank, holders.me) for rank in ranks]
    if causes.watchers:
        width = x.element_size() * math.prod((*x.shape[:2], x.shape[3]))
        causes.record_message(part.specs[1], part.group, width * holders.busiest, back=False)
    rows = [_rows(x, holders.held[holders.me], ranges) for ranges in sent]
    flat = torch.cat(rows, 2).permute(2, 0, 1, 3).contiguous()
    sizes = list(map(count, came)), list(map(count, sent))
    moved = awaited(all_to_all_single(flat, *sizes, part.group))
    order = torch.cat([_indices(ranges, x.device) for ranges in came]).argsort()
    return moved[order].permute(1, 2, 0, 3)


def _indices(ranges: Ranges, device: torch.device) -> Tensor:
    parts = [torch.arange(*each, device=device) for each in ranges]
    return torch.cat([torch.empty(0, dtype=torch.int64, device=device), *parts])


# -- the program's functions -----------------------------------------------------------------


def _shown(
    given: dict[str, Any], first: Sequence[int], rows: Tensor, columns: Tensor
) -> dict[str, Any]:
    """The arguments with functions of local indices, which call the program's with global ones."""
    score, whole, (batch, head) = given["score_mod"], given["block_mask"], first
    function, q_size, k_size = whole[-1], whole[-3], whole[-2]

    def scored(s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *more: Any) -> Any:
        return score(s, b + batch, h + head, rows[q], columns[k], *more)

    def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Any:
        row = rows[q.clamp(max=len(rows) - 1)]
        column = columns[k.clamp(max=len(columns) - 1)]  # a block may be longer than keys
        return function(b + batch, h + head, row, column)

    lines, blocks = -(-len(rows) // q_size), -(-len(columns) // k_size)
    listed = torch.arange(blocks, dtype=torch.int32, device=columns.device)
    # In each block the program's function decides.
    made = BlockMask.from_kv_blocks(
        torch.full((1, 1, lines), blocks, dtype=torch.int32, device=columns.device),
        listed.expand(1, 1, lines, blocks).contiguous(),
        BLOCK_SIZE=(q_size, k_size),
        mask_mod=allowed,
        seq_lengths=(len(rows), len(columns)),
    )
    scored_by = None if score is None else scored
    return {**given, "score_mod": scored_by, "block_mask": made.as_tuple()}
