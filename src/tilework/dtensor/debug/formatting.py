"""DTensors, told in a line and drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tilework.comm.world import get_rank
from tilework.dtensor.base import DTensorBase
from tilework.dtensor.spec import DTensorSpec
from tilework.layout import Box, Partial, Shard
from tilework.tiled.picture import Room, draw
from tilework.tiled.terminal import (
    COLOURS,
    StyledLine,
    bytes_text,
    coloured_picture,
    in_columns,
    print_styled,
)

_SHORT = {"float": "f", "bfloat": "bf", "complex": "c", "int": "i", "uint": "u"}
#: So many ranks are listed; of more, the first ones.
_LISTED = 32


def dtype_text(dtype: torch.dtype) -> str:
    """A dtype in few letters.

    Example:
        >>> [dtype_text(dtype) for dtype in (torch.float32, torch.bfloat16, torch.bool)]
        ['f32', 'bf16', 'bool']
    """
    name = str(dtype).removeprefix("torch.")
    kind = name.rstrip("0123456789")
    return _SHORT[kind] + name[len(kind) :] if kind in _SHORT and kind != name else name


def tensor_text(shape: Sequence[int], dtype: torch.dtype) -> str:
    """Like ``f32[3, 4]``."""
    return f"{dtype_text(dtype)}[{', '.join(map(str, shape))}]"


def layout_text(spec: DTensorSpec, dtype: torch.dtype) -> str:
    """Like ``f32[1024@dp, 4096] partial(sum)@tp``: behind a dim the axes that cut it, in order."""
    names = spec.mesh.mesh_dim_names or tuple(map(str, range(spec.mesh.ndim)))

    def axis_text(axis: int) -> str:
        placement = spec.placements[axis]
        sizes = placement.sizes if isinstance(placement, Shard) else None
        return f"@{names[axis]}" + (f"({'+'.join(map(str, sizes))})" if sizes else "")

    dims = [
        f"{size}{''.join(map(axis_text, spec.axes_of(dim)))}" for dim, size in enumerate(spec.shape)
    ]
    partial = [
        f" partial({one.reduce_op})@{name}"
        for name, one in zip(names, spec.placements, strict=True)
        if isinstance(one, Partial)
    ]
    return f"{dtype_text(dtype)}[{', '.join(dims)}]{''.join(partial)}"


def headline(tensor: DTensorBase) -> str:
    """What repr() says of a tensor. Local; shows no elements, which may be anywhere.

    Example:
        >>> import torch
        >>> from tilework.dtensor import Shard, distribute_tensor, init_device_mesh
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        ...     return repr(distribute_tensor(torch.ones(8, 4), mesh, [Shard(0), Shard(1)]))
        >>> print(run_ranks(2, program)[0])
        DTensor f32[8@dp, 4@tp] on cpu mesh dp=2 tp=1
    """
    spec = tensor._spec
    local = tensor._local_tensor
    gradient = ", requires_grad" if local.requires_grad else ""
    where = "meta" if local.is_meta else spec.mesh.device_type
    return f"DTensor {layout_text(spec, local.dtype)} on {where} mesh {spec.mesh.spec}{gradient}"


def show(tensor: DTensorBase) -> None:
    """Print how a tensor lies: a picture of who holds what, and a table of the ranks.

    Local; one rank may call it alone. Without colours (in a pipe, or with NO_COLOR set) the labels
    tell the same: ``0, 1`` is held by both ranks, ``0+1`` is what both hold, reduced.

    Raises:
        TypeError: It is no DTensor.

    Example:
        >>> import torch
        >>> from tilework.dtensor import Shard, distribute_tensor, init_device_mesh, show
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        ...     if rank == 0:
        ...         show(distribute_tensor(torch.ones(8, 4), mesh, [Shard(0)], src_data_rank=None))
        >>> _ = run_ranks(2, program)
        DTensor f32[8@tp, 4] on cpu mesh tp=2
        ...
    """
    if not isinstance(getattr(tensor, "_spec", None), DTensorSpec):
        raise TypeError(f"show() takes a DTensor, got {type(tensor).__name__}")
    spec = tensor._spec
    print_styled(
        lambda width: [
            [(headline(tensor), "bold")],
            [],
            *_picture(spec, width),
            [],
            *_table(tensor, width),
        ]
    )


def _holders(spec: DTensorSpec) -> dict[Box, list[list[int]]]:
    """Who holds each box: for each of its terms, the ranks."""
    found: dict[Box, list[list[int]]] = {}
    for tile in spec.tiling.tiles:
        found.setdefault(tile.box, []).append(list(tile.owners))
    return found


def _picture(spec: DTensorSpec, width: int) -> list[StyledLine]:
    holders = _holders(spec)
    labels = []
    for terms in holders.values():
        text = "+".join(
            ", ".join(map(str, ranks))
            if len(terms) == 1
            else f"({', '.join(map(str, ranks))})"
            if len(ranks) > 1
            else str(ranks[0])
            for ranks in terms
        )
        labels.append((text,))
    lines = draw(spec.shape, list(holders), labels, Room(width, 14, 12, 4))
    return coloured_picture(lines, lambda box: COLOURS[box % len(COLOURS)])


def _table(tensor: DTensorBase, width: int) -> list[StyledLine]:
    spec = tensor._spec
    mesh, itemsize = spec.mesh.spec, tensor.dtype.itemsize
    boxes = list(_holders(spec))
    names = mesh.names or tuple(map(str, range(mesh.ndim)))
    rows, colours = [("rank", " ".join(names), "bytes", "has")], [""]
    for rank in mesh.ranks[:_LISTED]:
        coordinate = mesh.coordinate(rank)
        assert coordinate is not None
        box = spec.box_at(coordinate)
        here = " (this)" if rank == get_rank() else ""
        at = " ".join(str(i).rjust(len(name)) for i, name in zip(coordinate, names, strict=True))
        rows.append((f"{rank}{here}", at, bytes_text(math.prod(box.sizes) * itemsize), str(box)))
        colours.append(COLOURS[boxes.index(box) % len(COLOURS)] if box in boxes else "")
    lines: list[StyledLine] = []
    for colour, text in zip(colours, in_columns(rows, width - 4), strict=True):
        style = "bold" if not lines else ""
        lines.append([("██  " if colour else "    ", colour), (text.rstrip(), style)])
    left = len(mesh.ranks) - _LISTED
    return [*lines, [(f"    … {left} more ranks", "")]] if left > 0 else lines
