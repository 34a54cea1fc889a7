"""Sharding of tensors by mesh axes: the one place, with ``box.py``, that knows where shards begin.

Several axes may shard one dim, in an order: the outermost axis splits the whole extent, the next
splits each of these shards, and so on. The ``splits`` of a dim are that order as a tuple; each
entry is an axis and the way in which the axis splits. Everything else follows from the splits.

A shard is one range of the dim, unless an axis deals blocks in turns: then it is several ranges,
and whoever asks for *the* range gets :class:`SeveralRangesError`. The same functions serve the dims
of tensors and the factors of operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tilework.layout.box import (
    Box,
    Cut,
    Ints,
    Splits,
    axes_of,
    boxes_of,
    chunk_offsets,
    chunk_sizes,
    combination_index,
    shard_extents,
    shard_ranges,
    sums_of_combinations,
    whole_box,
    whole_number,
    with_span,
)
from tilework.layout.placements import (
    Layout,
    Partial,
    Placement,
    Replicate,
    Shard,
    check_placements,
    native_placement,
    shard_of,
)
from tilework.layout.tiling import Tile, Tiling, trusted_tile, trusted_tiling

#: The ranks of a mesh, as lists in lists (or tuples), one level for each axis.
Mesh = Sequence[Any]


# -- layouts of all dims ---------------------------------------------------------------------


def splits_of(shape: Ints, lengths: Ints, layout: Layout) -> tuple[Splits, ...]:
    """The splits of each dim of a layout, axes of length 1 included, in the normal form."""
    check_placements(lengths, layout.placements, layout.order)
    splits: list[Splits] = [() for _ in shape]
    for axis in range(len(lengths)) if layout.order is None else layout.order:
        placement = layout.placements[axis]
        if isinstance(placement, Shard):
            dim = existing_dim(placement.dim, shape)
            extents = shard_extents(shape[dim], lengths, splits[dim])
            cut = _normal_cut(placement, extents, lengths[axis], dim, shape)
            splits[dim] = (*splits[dim], (axis, cut))
    return tuple(splits)


def _normal_cut(placement: Shard, extents: Ints, length: int, dim: int, shape: Ints) -> Cut:
    sizes = placement.sizes
    if sizes is None:
        return None if length == 1 else placement.cut
    for extent in extents:
        if len(sizes) != length or sum(sizes) != extent:
            raise ValueError(
                f"{placement} does not split an extent of {extent} into {length} shards: give "
                f"{length} sizes, one per rank, that add up to {extent}, which is the part of dim "
                f"{dim} of shape {list(shape)} that this axis splits"
            )
    chunks = all(list(sizes) == chunk_sizes(extent, length) for extent in extents)
    return None if chunks else sizes


def normal_form(
    shape: Ints, lengths: Ints, placements: Sequence[Any], order: Ints | None
) -> tuple[Layout, tuple[Splits, ...]]:
    """The normal form of a layout, whose placements may be torch's, and the splits of each dim."""
    layout = Layout(tuple(map(native_placement, placements)), order)
    splits = splits_of(shape, lengths, layout)
    return normal_layout(layout, splits), splits


def normal_layout(layout: Layout, splits: Sequence[Splits]) -> Layout:
    """The layout with these splits without ambiguity of dims, sizes and order."""
    placements = list(layout.placements)
    for dim, of_dim in enumerate(splits):
        for axis, cut in of_dim:
            placements[axis] = shard_of(dim, cut)
    return Layout(tuple(placements), normal_order(len(placements), splits))


def normal_order(count: int, splits: Sequence[Splits]) -> Ints | None:
    """The order of axes that share a dim, in the normal form; None if it is 0, 1, 2 and so on."""
    order = list(range(count))
    for of_dim in splits:
        axes = axes_of(of_dim)
        for place, axis in zip(sorted(axes), axes, strict=True):
            order[place] = axis
    return None if order == list(range(count)) else tuple(order)


def mesh_tiling(
    shape: Sequence[int],
    mesh: Mesh,
    placements: Sequence[Placement],
    *,
    order: Sequence[int] | None = None,
) -> Tiling:
    """The tiling of a tensor with these placements on a mesh.

    Where several axes shard one dim, the first splits the whole extent, and the next splits each of
    these shards. Where axes are Partial, ranks with the same coordinates along these axes hold one
    of the partial values of the tensor: the tiling has a term for each of these coordinates.

    Args:
        mesh: The ranks, in lists one level deep for each axis of the mesh.
        order: The axes in the order in which they shard; None: from the first to the last.

    Raises:
        ValueError: The mesh is ragged or has a rank twice, placements or order do not fit the axes,
            a dim does not exist, sizes do not add up, or axes name different reductions.

    Example:
        >>> tiling = mesh_tiling((4, 6), [[0, 1], [2, 3]], [Shard(0), Replicate()])
        >>> [(str(tile.box), tile.owners) for tile in tiling.tiles]
        [('[0:2, 0:6]', (0, 1)), ('[2:4, 0:6]', (2, 3))]
    """
    shape = tuple(map(int, shape))
    lengths, ranks = flat_mesh(mesh)
    if not ranks or len(set(ranks)) != len(ranks):
        raise ValueError(f"a mesh must have one or more ranks, none twice, got {list(ranks)}")
    layout = Layout(tuple(placements), None if order is None else tuple(order))
    splits = splits_of(shape, lengths, layout)
    kinds: dict[type[Placement], list[int]] = {Shard: [], Replicate: [], Partial: []}
    for axis, placement in enumerate(placements):
        kinds[placement.__class__].append(axis)
    sharding = kinds[Shard]
    if layout.order is not None:
        sharding = [axis for axis in layout.order if axis in sharding]
    spans = _spans(lengths)
    # The index in ``ranks`` of each combination of coordinates along some axes.
    cells, copies, firsts = (
        sums_of_combinations([spans[axis] for axis in axes])
        for axes in (sharding, kinds[Replicate], kinds[Partial])
    )
    every = _boxes(shape, lengths, splits, sharding)
    boxes = [(cell, box) for cell, of_cell in zip(cells, every, strict=True) for box in of_cell]

    def tile(place: int, box: Box) -> Tile:
        return trusted_tile(box, tuple([ranks[place + copy] for copy in copies]))

    terms = tuple([tuple([tile(first + place, box) for place, box in boxes]) for first in firsts])
    ops = [placement.reduce_op for placement in placements if isinstance(placement, Partial)]
    return trusted_tiling(shape, terms, ops[0] if len(terms) > 1 else None)


def _spans(lengths: Ints) -> list[range]:
    """For each axis, the flat indices of ranks that differ from the first only along this axis."""
    spans, stride = [], 1
    for length in reversed(lengths):
        spans.append(range(0, stride * length, stride))
        stride *= length
    return spans[::-1]


def _boxes(
    shape: Ints, lengths: Ints, splits: Sequence[Splits], sharding: Sequence[int]
) -> list[tuple[Box, ...]]:
    ranges = []
    for extent, of_dim in zip(shape, splits, strict=True):
        every = shard_ranges(extent, lengths, of_dim)
        ranges.append([every[i] for i in combination_index(sharding, axes_of(of_dim), lengths)])
    return list(map(boxes_of, zip(*ranges, strict=True))) if shape else [(Box((), ()),)]


def chunk_tiling(shape: Sequence[int], dim: int, owners: Sequence[int]) -> Tiling:
    """The tiling with a chunk of ``dim`` for each entry of ``owners``, as ``torch.chunk`` splits.

    A rank may own several chunks. An empty chunk may start past the end of the dim, as in
    :func:`~tilework.layout.chunk_offsets`.

    Raises:
        ValueError: There is no owner, or no such dim.

    Example:
        >>> [str(box) for box in chunk_tiling((5, 2), 0, [0, 1, 0]).boxes_of(0)]
        ['[0:2, 0:2]', '[4:5, 0:2]']
    """
    shape = tuple(map(int, shape))
    dim = existing_dim(dim, shape)
    starts = chunk_offsets(shape[dim], len(owners))
    sizes = chunk_sizes(shape[dim], len(owners))
    whole = whole_box(shape)
    tiles = [
        trusted_tile(with_span(whole, dim, start, size), (int(owner),))
        for start, size, owner in zip(starts, sizes, owners, strict=True)
    ]
    return trusted_tiling(shape, (tuple(tiles),))


def existing_dim(dim: int, shape: Ints) -> int:
    """A dim of a tensor as a number from 0, where negative numbers count from the last."""
    if not -len(shape) <= dim < len(shape):
        there = f"its dims are {-len(shape)} to {len(shape) - 1}" if shape else "it has none"
        raise ValueError(f"a tensor of shape {shape} has no dim {dim}: {there}")
    return dim % len(shape)


def flat_mesh(nested: Any) -> tuple[Ints, Ints]:
    """The shape and the ranks of a mesh in nested sequences; the last axis runs fastest."""
    if isinstance(nested, str | bytes) or not isinstance(nested, Sequence):
        takes = "a mesh is ranks in nested sequences, or a tensor of ranks"
        return (), (whole_number(nested, takes),)
    parts = [flat_mesh(part) for part in nested]
    shapes = {shape for shape, _ in parts} or {()}
    if len(shapes) > 1:
        raise ValueError(f"a mesh must be a full grid, but rows differ in length: {nested!r}")
    return (len(parts), *shapes.pop()), tuple([rank for _, ranks in parts for rank in ranks])
