"""A DTensor's layout as a page: which rank holds which part, and a table of the ranks."""

from __future__ import annotations

import math

from tilework.dtensor.base import DTensorBase
from tilework.dtensor.debug.formatting import headline
from tilework.dtensor.torch_tensors import refuse_torch_dtensor
from tilework.layout import Box
from tilework.show import Page, Picture, TextTable, bytes_text, colour

#: The most ranks that the table lists; it leaves out later ranks.
_LISTED = 32


def layout_page(tensor: DTensorBase) -> Page:
    """The headline, the picture and the table of a tensor. Local."""
    spec = tensor._spec
    holders: dict[Box, list[tuple[int, ...]]] = {}  # several for partial values
    for tile in spec.tiling.tiles:
        holders.setdefault(tile.box, []).append(tile.owners)
    numbers: dict[str, int] = {}  # by holders: of several boxes, if blocks are dealt in turns
    colours = {
        box: colour(numbers.setdefault(str(ranks), len(numbers))) for box, ranks in holders.items()
    }
    labels = [[_label(partials)] for partials in holders.values()]
    picture = Picture(spec.shape, list(holders), labels, list(colours.values()))
    mesh, itemsize = spec.mesh.spec, tensor._local_tensor.dtype.itemsize
    names, here = mesh.names or tuple(map(str, range(mesh.ndim))), spec.mesh.get_coordinate()
    rows = []
    for rank in mesh.ranks[:_LISTED]:
        place = mesh.coordinate(rank)
        assert place is not None
        boxes = spec.boxes_at(place)
        at = " ".join(str(i).rjust(len(name)) for i, name in zip(place, names, strict=True))
        who = f"{rank}{' (this)' * (list(place) == here)}"
        size = bytes_text(math.prod(spec.sizes_at(place)) * itemsize)
        own = next((colours[box] for box in boxes if box in colours), "")
        rows.append((("██" * bool(own), own), who, at, size, " ".join(map(str, boxes))))
    table = TextTable(("", "rank", " ".join(names), "bytes", "has"), rows, {3, 4}, (4, 2))
    left = len(mesh.ranks) - _LISTED
    more = [f"    … {left} more ranks"] * (left > 0)
    return Page((headline(tensor), "bold"), "", picture, "", table, *more)


def _label(partials: list[tuple[int, ...]]) -> str:
    """The ranks with copies, or with each partial value, as in ``(0, 1)+(2, 3)``."""
    texts = [", ".join(map(str, ranks)) for ranks in partials]
    alone = len(partials) == 1
    return "+".join(text if alone or "," not in text else f"({text})" for text in texts)


def show(tensor: DTensorBase) -> None:
    """Print a tensor's layout: a picture of which rank holds which part, and a table of the ranks.

    Local; one rank may call it alone. Without colours (in a pipe, or with NO_COLOR set) labels show
    who holds a part: with ``0, 1`` ranks 0 and 1 hold copies of the part, and with ``0+1`` they
    hold partial values, whose reduction is the part.

    Raises:
        TypeError: ``tensor`` is not a DTensor.

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
    refuse_torch_dtensor(tensor, "show()")
    if not isinstance(tensor, DTensorBase):
        raise TypeError(f"show() takes a DTensor, got {type(tensor).__name__}")
    layout_page(tensor).print()
