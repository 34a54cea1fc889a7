"""A sharded tensor in styled lines: a picture, and a table of each owner's shards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from tilework.sharded.formatting import Overview, ShardOwner, headline, owner_names
from tilework.tiled import PictureSize, StyledLine, bytes_text, coloured_picture, in_columns

#: The maximum length of bars in the table.
_BAR_WIDTH = 20
#: Up to this number each owner has a row; else equal neighbours share a row.
_LISTED = 16
_TITLES = ("who", "shards", "bytes", "share")


def overview_lines(view: Overview, width: int) -> list[StyledLine]:
    """The headline, the picture and the table of a tensor, at most ``width`` wide. Local."""
    shards = view.metadata.shards_metadata
    lines = view.picture(PictureSize(width, 14, 12, 4))
    picture = coloured_picture(lines, lambda number: view.colour_of(shards[number]))
    return [[(headline(view), "bold")], [], *picture, [], *_table(view, width)]


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


def _rows(owners: Sequence[ShardOwner]) -> list[list[ShardOwner]]:
    """The owners of each row: one, or several neighbours with equal shares if there are many."""
    if len(owners) <= _LISTED:
        return [[owner] for owner in owners]
    runs = groupby(owners, key=lambda owner: (owner.device_types, owner.sizes))
    rows = [list(run) for _, run in runs]
    rest = [owner for row in rows[_LISTED - 1 :] for owner in row]
    return rows if len(rows) <= _LISTED else [*rows[: _LISTED - 1], rest]


def _words(row: Sequence[ShardOwner], total_bytes: int) -> tuple[str, ...]:
    """The cells of a row of the table: owners, shards, bytes, and share of all bytes."""
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
