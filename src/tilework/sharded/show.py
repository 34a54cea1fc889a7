"""A sharded tensor on a terminal: a picture in colours, and a table of what each rank has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from tilework.sharded.base import ShardedTensorBase
from tilework.sharded.formatting import Overview, Owner, headline, overview, owner_names
from tilework.sharded.metadata import TensorProperties
from tilework.sharded.specs import ShardingSpec
from tilework.tiled.picture import PictureSize
from tilework.tiled.terminal import (
    StyledLine,
    bytes_text,
    coloured_picture,
    in_columns,
    print_styled,
)

#: No bar of the table is longer.
_BAR_WIDTH = 20
#: So many owners are listed one by one; of more, neighbours that have as much are joined.
_LISTED = 16
_TITLES = ("who", "shards", "bytes", "share")


def show(
    tensor: Tensor | ShardingSpec,
    *,
    size: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Print who holds what: a picture in colours, and a table of what each rank has.

    Local: it needs no more than the metadata, so one rank may call it alone. The picture shows
    the shards in proportion, but none too small to be seen. Without colours (in a pipe, or with
    NO_COLOR set) the labels tell the same. Of hundreds of shards some are drawn.

    Args:
        tensor: A sharded tensor; or a spec, to see how it would shard one.
        size: The tensor's shape; with a spec only.
        dtype: The tensor's dtype, with a spec only; torch's default dtype if None.

    Raises:
        TypeError: It is neither a sharded tensor nor a spec.
        ValueError: The spec does not fit the size, or a spec comes without one.

    Example:
        >>> from tilework.sharded import ChunkShardingSpec, show
        >>> show(ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), size=(3,))
        float32[3] in 2 chunks along dim 0 on ranks 0-1
        ...
    """
    view = _overview(tensor, size, dtype)
    shards = view.metadata.shards_metadata

    def render(width: int) -> list[StyledLine]:
        lines = view.picture(PictureSize(width, 14, 12, 4))
        picture = coloured_picture(lines, lambda number: view.colour_of(shards[number]))
        return [[(headline(view), "bold")], [], *picture, [], *_table(view, width)]

    print_styled(render)


def _overview(
    tensor: Tensor | ShardingSpec, size: Sequence[int] | None, dtype: torch.dtype | None
) -> Overview:
    if isinstance(tensor, ShardingSpec):
        if size is None:
            raise ValueError("a spec alone has no size: say show(spec, size=(...))")
        properties = TensorProperties(dtype or torch.get_default_dtype())
        return overview(tensor.build_metadata(tuple(size), properties), tensor)
    if not isinstance(tensor, ShardedTensorBase):
        raise TypeError(
            f"expected a sharded tensor or a sharding spec, got {type(tensor).__name__}; a plain "
            f"tensor is not on several ranks"
        )
    if size is not None or dtype is not None:
        raise ValueError("size and dtype are those of the tensor: give them with a spec only")
    return tensor._overview()


def _table(view: Overview, width: int) -> list[StyledLine]:
    """A row for each owner, with bars for the bytes if there is room for them."""
    rows, total = _rows(view.owners), view.total_bytes or 1
    words = [_TITLES, *(_words(row, total) for row in rows), _total_words(view)]
    titles, *texts, totals = in_columns(words, width - 4)
    most = max((owner.n_bytes for owner in view.owners), default=0) or 1
    room = min(_BAR_WIDTH, width - 6 - len(titles))
    lines: list[StyledLine] = [[(f"    {titles}".rstrip(), "bold")]]
    for row, text in zip(rows, texts, strict=True):
        colour = view.colour_of(row[0].shards[0]) if row[0].shards and len(row) == 1 else ""
        length = math.ceil(room * max(owner.n_bytes for owner in row) / most) if room > 4 else 0
        swatch, bar = "██  " if colour else "    ", f"  {'█' * length}" if length else ""
        lines.append([(swatch, colour), (text if bar else text.rstrip(), ""), (bar, colour)])
    return [*lines, [(f"    {totals}".rstrip(), "bold")]]


def _rows(owners: Sequence[Owner]) -> list[list[Owner]]:
    """The owners of each row: one, or of many owners neighbours that have as much."""
    if len(owners) <= _LISTED:
        return [[owner] for owner in owners]
    runs = groupby(owners, key=lambda owner: (owner.device_types, owner.sizes))
    rows = [list(run) for _, run in runs]
    rest = [owner for row in rows[_LISTED - 1 :] for owner in row]
    return rows if len(rows) <= _LISTED else [*rows[: _LISTED - 1], rest]


def _words(row: Sequence[Owner], total_bytes: int) -> tuple[str, ...]:
    """The owners, their shards, bytes, and share of all bytes."""
    first, loads = row[0], sorted(owner.n_bytes for owner in row)
    if len(row) == 1:
        share = f"{first.n_bytes / total_bytes:.1%}"
        return first.place, _sizes_text(first.sizes), bytes_text(first.n_bytes), share
    alike = all(owner.sizes == first.sizes for owner in row)
    shards = f"each {_sizes_text(first.sizes)}" if alike else "of several sizes"
    span = " to ".join(dict.fromkeys((bytes_text(loads[0]), bytes_text(loads[-1]))))
    return owner_names(row), shards, f"{span} each", f"{sum(loads) / total_bytes:.1%}"


def _total_words(view: Overview) -> tuple[str, ...]:
    n, share = len(view.metadata.shards_metadata), 1 if view.total_bytes else 0
    return "all", f"{n:,} shard{'s' * (n != 1)}", bytes_text(view.total_bytes), f"{share:.1%}"


def _sizes_text(sizes: Sequence[tuple[int, ...]]) -> str:
    """The sizes of an owner's shards, as in ``2 x [3, 20] + [1, 20]``."""
    runs = [(list(size), len(list(run))) for size, run in groupby(sizes)]
    words = [f"{n} x {size}" if n > 1 else str(size) for size, n in runs]
    if len(words) > 3:
        words = [*words[:2], f"… ({len(sizes)} in all)"]
    return " + ".join(words) or "none"
