"""Tensors composed of parts of saved tensors, which stay in place: several, or a piece. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from tilework.checkpoint.format import Part, SavedTensor, chunk_count
from tilework.errors import CheckpointError
from tilework.layout import Box
from tilework.layout.internal import replaced, whole_box, with_span

#: Bytes read at a time from files without checksums, to read little around the needed bytes.
UNCHECKED_BYTES = 64 << 10


@dataclass(frozen=True)
class PieceOf:
    """A piece of a tensor that is cut into equal pieces, as a value of ``map_names``.

    Args:
        number: The number of the piece, from 0.
        dim: The dim along which the tensor is cut.
    """

    name: str
    number: int
    count: int
    dim: int = 0


#: The checkpoint's tensor or tensors for a name of the state: a name, several names to join along
#: dim 0, or a piece of a tensor.
Mapped = str | Sequence[str] | PieceOf
MapNames = Callable[[str], Mapped] | Mapping[str, Mapped] | None


def mapped_name(name: str, map_names: MapNames) -> Mapped:
    """The checkpoint's tensor or tensors for a name of the state."""
    mapped: Any = map_names(name) if callable(map_names) else (map_names or {}).get(name, name)
    if isinstance(mapped, str | PieceOf):
        return mapped
    if isinstance(mapped, Sequence) and mapped and all(isinstance(each, str) for each in mapped):
        return mapped
    raise CheckpointError(
        f"map_names gives {mapped!r} for {name!r}: it must give a name, a list of at least one "
        f"name, or a PieceOf",
        tensor=name,
    )


def joined(tensors: Sequence[SavedTensor], dim: int = 0) -> SavedTensor:
    """The concatenation of tensors along a dim."""
    first = tensors[0]
    for each in tensors:
        if each.dtype != first.dtype or replaced(each.shape, dim, 0) != replaced(
            first.shape, dim, 0
        ):
            raise CheckpointError(
                f"{first.name!r} ({first.dtype}, {list(first.shape)}) and {each.name!r} "
                f"({each.dtype}, {list(each.shape)}) cannot be joined along dim {dim}: joined "
                f"tensors must have the same dtype and the same sizes of the other dims",
                tensor=each.name,
            )
    parts: list[Part] = []
    at = 0
    for each in tensors:
        for part in each.parts:
            start, size = part.box.offsets[dim], part.box.sizes[dim]
            parts.append(replace(part, box=with_span(part.box, dim, at + start, size)))
        at += each.shape[dim]
    shape = replaced(first.shape, dim, at)
    return SavedTensor(" + ".join(each.name for each in tensors), first.dtype, shape, tuple(parts))


def stacked(tensors: Sequence[SavedTensor]) -> SavedTensor:
    """Tensors of the same shape, stacked along a new first dim."""
    return joined([_with_first_dim(each) for each in tensors])


def unstacked(tensor: SavedTensor) -> list[SavedTensor]:
    """The tensors that are stacked in one tensor along the first dim."""
    parts: list[list[Part]] = [[] for _ in range(tensor.shape[0])]
    for part in tensor.parts:
        count, offsets, sizes = part.box.sizes[0], part.box.offsets[1:], part.box.sizes[1:]
        nbytes = part.nbytes // count
        sums = (0,) * chunk_count(nbytes, UNCHECKED_BYTES)
        for row in range(count):
            found = Part(Box(offsets, sizes), part.file, part.offset + row * nbytes, nbytes, sums)
            parts[part.box.offsets[0] + row].append(found)
    return [
        SavedTensor(f"{tensor.name}[{n}]", tensor.dtype, tensor.shape[1:], tuple(each))
        for n, each in enumerate(parts)
    ]


def piece(tensor: SavedTensor, of: PieceOf) -> SavedTensor:
    """The piece of a tensor that ``of`` describes; each part of it is contiguous in a file."""
    dim = of.dim
    if not 0 <= of.number < of.count:
        raise CheckpointError(
            f"{tensor.name!r} has no piece {of.number} of {of.count}: pieces are numbered from 0. "
            f"Correct the number or the count of the PieceOf in map_names",
            tensor=tensor.name,
        )
    if not 0 <= dim < len(tensor.shape) or tensor.shape[dim] % of.count:
        raise CheckpointError(
            f"{tensor.name!r} of shape {list(tensor.shape)} cannot be cut into {of.count} equal "
            f"pieces along dim {dim}: correct the count or the dim of the PieceOf in map_names",
            tensor=tensor.name,
        )
    if any(any(part.crc32) for part in tensor.parts):
        raise CheckpointError(
            f"{tensor.name!r} has checksums of the whole tensor, with which a piece cannot be "
            f"compared: PieceOf is for published weights. Load the whole tensor, and cut it",
            tensor=tensor.name,
        )
    size = tensor.shape[dim] // of.count
    window = with_span(whole_box(tensor.shape), dim, size * of.number, size)
    parts = [
        run
        for part in tensor.parts
        if (shared := part.box.intersection(window)) is not None
        for run in runs(part, shared, window, tensor.itemsize)
    ]
    name = f"{tensor.name}[{of.number}/{of.count}]"
    return SavedTensor(name, tensor.dtype, window.sizes, tuple(parts))


def runs(part: Part, region: Box, window: Box, itemsize: int) -> Iterator[Part]:
    """Cut a region of a part into runs of the file, with boxes relative to ``window``."""
    strides = [math.prod(part.box.sizes[d + 1 :]) for d in range(len(part.box.sizes))]
    whole = len(region.sizes)  # from this dim on a box is as large as the part
    while whole and region.sizes[whole - 1] == part.box.sizes[whole - 1]:
        whole -= 1
    outer = max(0, whole - 1)
    for index in product(*map(range, region.sizes[:outer])):
        offsets = (
            *(o + i for o, i in zip(region.offsets, index, strict=False)),
            *region.offsets[outer:],
        )
        box = Box(offsets, (1,) * outer + region.sizes[outer:])
        start = sum(
            (o - begin) * stride
            for o, begin, stride in zip(offsets, part.box.offsets, strides, strict=True)
        )
        nbytes = box.volume * itemsize
        sums = (0,) * chunk_count(nbytes, UNCHECKED_BYTES)
        place = part.offset + start * itemsize
        yield Part(box.relative_to(window), part.file, place, nbytes, sums)


def _with_first_dim(tensor: SavedTensor) -> SavedTensor:
    parts = [
        replace(part, box=Box((0, *part.box.offsets), (1, *part.box.sizes)))
        for part in tensor.parts
    ]
    return replace(tensor, shape=(1, *tensor.shape), parts=tuple(parts))
