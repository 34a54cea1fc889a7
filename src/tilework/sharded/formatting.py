"""Who holds what: a sharded tensor in one line, in plain text, and in colours on a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from tilework.sharded.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from tilework.sharded.specs import ChunkShardingSpec, ShardingSpec
from tilework.tiled.picture import Line, Room, draw
from tilework.tiled.tensor import TiledTensor
from tilework.tiled.terminal import (
    COLOURS,
    StyledLine,
    bytes_text,
    coloured_picture,
    in_columns,
    print_styled,
)

if TYPE_CHECKING:
    from tilework.sharded.base import ShardedTensorBase

#: For print(), which does not know the terminal.
_PLAIN = Room(width=64, height=9, parts=6, slices=2)
#: No bar of the table is longer.
_BAR_WIDTH = 20
#: So many owners are listed one by one; of more, neighbours that hold as much are joined.
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
        tensor: A sharded tensor; or a spec, to see how it would cut one.
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
    view = _view_of(tensor, size, dtype)

    def render(width: int) -> list[StyledLine]:
        shards = view.metadata.shards_metadata
        picture = coloured_picture(
            view.picture(Room(width, 14, 12, 4)), lambda number: view.colour_of(shards[number])
        )
        return [[(_headline(view), "bold")], [], *picture, [], *_table(view, width)]

    print_styled(render)


def one_line(tensor: ShardedTensorBase) -> str:
    """What repr() says of a tensor. Local.

    Example:
        >>> from tilework.sharded import ChunkShardingSpec, zeros
        >>> from tilework.testing import run_ranks
        >>> spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        >>> run_ranks(2, lambda rank: zeros(spec, 10, 20))[0]
        ShardedTensor(float32[10, 20] in 2 chunks along dim 0 on ranks 0-1)
    """
    metadata = tensor.metadata()
    view = _View("", tensor.sharding_spec(), metadata, tuple(_owners(metadata)))
    return f"{type(tensor).__name__}({_headline(view)})"


def as_text(tensor: ShardedTensorBase) -> str:
    """What print() shows of a tensor: one line, the picture, and the bytes of the ranks. Local."""
    view = _view_of(tensor)
    picture = ["".join(text for text, _ in line) for line in view.picture(_PLAIN)]
    return "\n".join([_headline(view), *picture, f"{bytes_text(view.total)}: {_loads(view)}"])


@dataclass(frozen=True)
class _Owner:
    """A rank or worker, and its shards."""

    name: str
    rank: int | None
    devices: tuple[str, ...]
    shards: tuple[ShardMetadata, ...]
    held: int  # bytes

    @property
    def place(self) -> str:
        return f"{self.name}/{'+'.join(self.devices)}" if self.devices else self.name

    @property
    def kinds(self) -> set[str]:
        """The types of its devices."""
        return {device.partition(":")[0] for device in self.devices}

    @property
    def sizes(self) -> list[tuple[int, ...]]:
        """Those of its shards."""
        return [tuple(shard.shard_sizes) for shard in self.shards]


@dataclass(frozen=True)
class _View:
    """What can be told of a tensor."""

    name: str  # how the headline begins
    spec: ShardingSpec
    metadata: ShardedTensorMetadata
    owners: tuple[_Owner, ...]

    @property
    def total(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.metadata.size) * self.metadata.tensor_properties.dtype.itemsize

    def colour_of(self, shard: ShardMetadata) -> str:
        """The same for all shards of an owner, another for its neighbours."""
        names = [owner.name for owner in self.owners]
        return COLOURS[names.index(_owner_name(shard)) % len(COLOURS)]

    def picture(self, room: Room) -> list[Line]:
        """The shards, as lines of text."""
        shards = self.metadata.shards_metadata
        labels = [(str(s.placement or "?"), _owner_name(s).removeprefix("rank:")) for s in shards]
        return draw(self.metadata.size, [shard.box for shard in shards], labels, room)


def _view_of(
    tensor: Tensor | ShardingSpec,
    size: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> _View:
    if isinstance(tensor, ShardingSpec):
        if size is None:
            raise ValueError("a spec alone has no size: say show(spec, size=(...))")
        properties = TensorProperties(dtype or torch.get_default_dtype())
        metadata = tensor.build_metadata(tuple(size), properties)
        return _View("", tensor, metadata, tuple(_owners(metadata)))
    if not isinstance(tensor, TiledTensor):
        raise TypeError(
            f"expected a sharded tensor or a sharding spec, got {type(tensor).__name__}; a plain "
            f"tensor is not on several ranks"
        )
    if size is not None or dtype is not None:
        raise ValueError("size and dtype are those of the tensor: give them with a spec only")
    tensor = cast("ShardedTensorBase", tensor)
    metadata, group = tensor.metadata(), tensor._group()
    idle: set[int] = set()
    if group is not None:
        idle = set(group.global_ranks) - set(tensor.tiling.ranks)
    without = [_Owner(f"rank:{rank}", rank, (), (), 0) for rank in sorted(idle)]
    name = f"{type(tensor).__name__} "
    return _View(name, tensor.sharding_spec(), metadata, (*_owners(metadata), *without))


def _owner_name(shard: ShardMetadata) -> str:
    place = shard.placement
    if place is None:
        return "?"
    return place.worker_name() or ("here" if place.rank() is None else f"rank:{place.rank()}")


def _owners(metadata: ShardedTensorMetadata) -> list[_Owner]:
    """All that have shards, empty ones too, in the order of ranks."""
    found: dict[str, list[ShardMetadata]] = {}
    for shard in metadata.shards_metadata:
        found.setdefault(_owner_name(shard), []).append(shard)
    itemsize = metadata.tensor_properties.dtype.itemsize
    owners = []
    for name, shards in found.items():
        places = [shard.placement for shard in shards if shard.placement is not None]
        devices = tuple(dict.fromkeys(str(place.device()) for place in places))
        held = sum(shard.box.volume for shard in shards) * itemsize
        rank = places[0].rank() if places else None
        owners.append(_Owner(name, rank, devices, tuple(shards), held))
    # Workers, whose ranks the metadata doesn't tell, come last, in the order of their shards.
    return sorted(owners, key=lambda owner: math.inf if owner.rank is None else owner.rank)


# -- in words ------------------------------------------------------------------------------


def _headline(view: _View) -> str:
    properties, n = view.metadata.tensor_properties, len(view.metadata.shards_metadata)
    dtype = str(properties.dtype).removeprefix("torch.")
    cut = f"shard{'s' * (n != 1)}"
    if isinstance(view.spec, ChunkShardingSpec):
        cut = f"chunk{'s' * (n != 1)} along dim {view.spec.dim % len(view.metadata.size)}"
    holders = [owner for owner in view.owners if owner.shards]
    kinds = set[str]().union(*(owner.kinds for owner in holders)) - {"cpu"}
    on = f" ({', '.join(sorted(kinds))})" if kinds else ""
    gradient = ", requires_grad" if properties.requires_grad else ""
    what = f"{view.name}{dtype}{list(view.metadata.size)}"
    return f"{what} in {n} {cut} on {_names(holders)}{on}{gradient}"


def _names(owners: Iterable[_Owner]) -> str:
    """As in ``ranks 0-3, 7``, or ``trainer, ps0``."""
    owners = list(owners)
    ranks = sorted({owner.rank for owner in owners if owner.rank is not None})
    found = [owner.name for owner in owners if owner.rank is None]
    if ranks:
        found = [f"rank{'s' * (len(ranks) > 1)} {_spans(ranks)[0]}", *_spans(ranks)[1:], *found]
    return ", ".join(found if len(found) <= 6 else [*found[:5], f"… ({len(owners)} in all)"])


def _spans(ranks: Sequence[int]) -> list[str]:
    """Neighbouring numbers joined, as in ``0-3``."""
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(ranks), key=lambda item: item[1] - item[0])
    ]
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]


def _loads(view: _View) -> str:
    """How many bytes who has."""
    by_load: dict[int, list[_Owner]] = {}
    for owner in view.owners:
        by_load.setdefault(owner.held, []).append(owner)
    if len(by_load) > 4:
        return f"{bytes_text(min(by_load))} to {bytes_text(max(by_load))} on {_names(view.owners)}"
    return ", ".join(
        f"{bytes_text(n) if n else 'nothing'} on {_names(owners)}" for n, owners in by_load.items()
    )


# -- in colours ----------------------------------------------------------------------------


def _table(view: _View, width: int) -> list[StyledLine]:
    """What each owner has, and bars for the bytes if there is room for them."""
    rows, total = _rows(view.owners), view.total or 1
    told = [_TITLES, *(_told(row, total) for row in rows), _all_told(view)]
    titles, *texts, totals = in_columns(told, width - 4)
    most = max((owner.held for owner in view.owners), default=0) or 1
    room = min(_BAR_WIDTH, width - 6 - len(titles))
    lines: list[StyledLine] = [[(f"    {titles}".rstrip(), "bold")]]
    for row, text in zip(rows, texts, strict=True):
        colour = view.colour_of(row[0].shards[0]) if row[0].shards and len(row) == 1 else ""
        length = math.ceil(room * max(owner.held for owner in row) / most) if room > 4 else 0
        swatch, bar = "██  " if colour else "    ", f"  {'█' * length}" if length else ""
        lines.append([(swatch, colour), (text if bar else text.rstrip(), ""), (bar, colour)])
    return [*lines, [(f"    {totals}".rstrip(), "bold")]]


def _rows(owners: Sequence[_Owner]) -> list[list[_Owner]]:
    """What is told in one row: each owner, or if they are many, neighbours that hold as much."""
    if len(owners) <= _LISTED:
        return [[owner] for owner in owners]
    runs = groupby(owners, key=lambda owner: (owner.kinds, owner.sizes))
    rows = [list(run) for _, run in runs]
    rest = [owner for row in rows[_LISTED - 1 :] for owner in row]
    return rows if len(rows) <= _LISTED else [*rows[: _LISTED - 1], rest]


def _told(row: Sequence[_Owner], total: int) -> tuple[str, ...]:
    """Who, which shards, bytes, and the share of all bytes."""
    first, loads = row[0], sorted(owner.held for owner in row)
    if len(row) == 1:
        shares = f"{first.held / total:.1%}"
        return first.place, _sizes_text(first.sizes), bytes_text(first.held), shares
    alike = all(owner.sizes == first.sizes for owner in row)
    shards = f"each {_sizes_text(first.sizes)}" if alike else "of several sizes"
    span = " to ".join(dict.fromkeys((bytes_text(loads[0]), bytes_text(loads[-1]))))
    return (_names(row), shards, f"{span} each", f"{sum(owner.held for owner in row) / total:.1%}")


def _all_told(view: _View) -> tuple[str, ...]:
    n, whole = len(view.metadata.shards_metadata), 1 if view.total else 0
    return "all", f"{n:,} shard{'s' * (n != 1)}", bytes_text(view.total), f"{whole:.1%}"


def _sizes_text(sizes: Sequence[tuple[int, ...]]) -> str:
    """Those of an owner's shards, as in ``2 x [3, 20] + [1, 20]``."""
    runs = [(list(size), len(list(run))) for size, run in groupby(sizes)]
    words = [f"{n} x {size}" if n > 1 else str(size) for size, n in runs]
    if len(words) > 3:
        words = [*words[:2], f"… ({len(sizes)} in all)"]
    return " + ".join(words) or "none"
