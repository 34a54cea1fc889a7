"""Owners of a sharded tensor's shards: a line for repr(), pages for print() and show()."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from tilework.sharded.metadata import ShardedTensorMetadata, ShardMetadata
from tilework.sharded.specs import ChunkShardingSpec, ShardingSpec
from tilework.show import (
    Bar,
    Page,
    Picture,
    Styled,
    TextTable,
    bytes_text,
    colour,
    count_text,
    run_texts,
)

#: Up to this number each owner has a row; else equal neighbours share a row.
_LISTED = 16


@dataclass(frozen=True)
class ShardOwner:
    """A rank or worker, and the shards that it owns. A worker may be known only by name."""

    name: str
    rank: int | None
    devices: tuple[str, ...]
    shards: tuple[ShardMetadata, ...]
    n_bytes: int

    @property
    def device_types(self) -> set[str]:
        return {device.partition(":")[0] for device in self.devices}

    @property
    def sizes(self) -> list[tuple[int, ...]]:
        return [tuple(shard.shard_sizes) for shard in self.shards]


@dataclass(frozen=True)
class Overview:
    """A tensor without the values: the metadata, and each owner's shards."""

    name: str  # the beginning of the headline
    #: The spec of the tensor. The headline names the sharded dim of a ChunkShardingSpec.
    spec: ShardingSpec
    metadata: ShardedTensorMetadata
    #: The owners of shards, ranks first and ascending. Ranks of the group without shards follow.
    owners: tuple[ShardOwner, ...]


def overview(
    metadata: ShardedTensorMetadata,
    spec: ShardingSpec,
    name: str = "",
    idle_ranks: Iterable[int] = (),
) -> Overview:
    """The overview of a tensor; ``idle_ranks`` are those ranks of the group without shards."""
    idle = [ShardOwner(f"rank:{rank}", rank, (), (), 0) for rank in sorted(idle_ranks)]
    return Overview(name, spec, metadata, (*_owners(metadata), *idle))


def _owner_name(shard: ShardMetadata) -> str:
    place = shard.placement
    if place is None:
        return "?"
    return place.worker_name() or ("here" if place.rank() is None else f"rank:{place.rank()}")


def _owners(metadata: ShardedTensorMetadata) -> list[ShardOwner]:
    by_name: dict[str, list[ShardMetadata]] = {}
    for shard in metadata.shards_metadata:
        by_name.setdefault(_owner_name(shard), []).append(shard)
    itemsize = metadata.tensor_properties.dtype.itemsize
    owners = []
    for name, shards in by_name.items():
        places = [shard.placement for shard in shards if shard.placement is not None]
        devices = tuple(dict.fromkeys(str(place.device()) for place in places))
        n_bytes = sum(shard.box.volume for shard in shards) * itemsize
        rank = places[0].rank() if places else None
        owners.append(ShardOwner(name, rank, devices, tuple(shards), n_bytes))
    # Workers, whose ranks are not in the metadata, come last, in the order of their shards.
    return sorted(owners, key=lambda owner: math.inf if owner.rank is None else owner.rank)


def headline(view: Overview) -> str:
    """A line with dtype, size, shards and owners. Shown by repr()."""
    properties, n = view.metadata.tensor_properties, len(view.metadata.shards_metadata)
    dtype = str(properties.dtype).removeprefix("torch.")
    shards = count_text(n, "shard")
    if isinstance(view.spec, ChunkShardingSpec):
        shards = f"{count_text(n, 'chunk')} along dim {view.spec.dim % len(view.metadata.size)}"
    holders = [owner for owner in view.owners if owner.shards]
    devices = set[str]().union(*(owner.device_types for owner in holders)) - {"cpu"}
    on = f" ({', '.join(sorted(devices))})" if devices else ""
    gradient = ", requires_grad" if properties.requires_grad else ""
    what = f"{view.name}{dtype}{list(view.metadata.size)}"
    return f"{what} in {shards} on {owner_names(holders)}{on}{gradient}"


def overview_page(view: Overview) -> Page:
    """The headline, the picture, and a table of each owner's shards. Local."""
    shards, owners = view.metadata.shards_metadata, view.owners
    nbytes = math.prod(view.metadata.size) * view.metadata.tensor_properties.dtype.itemsize
    colours = {owner.name: colour(number) for number, owner in enumerate(owners)}
    boxes = [shard.box for shard in shards]
    labels = [(str(s.placement or "?"), _owner_name(s).removeprefix("rank:")) for s in shards]
    fills = [colours[_owner_name(shard)] for shard in shards]
    picture = Picture(view.metadata.size, boxes, labels, fills)
    most = max((owner.n_bytes for owner in owners), default=0) or 1
    rows: list[list[str | Styled | Bar]] = []
    for row in _rows(owners):
        style = colours[row[0].name] if row[0].shards and len(row) == 1 else ""
        bar = Bar(max(owner.n_bytes for owner in row) / most, style)
        rows.append([("██" * bool(style), style), *_words(row, nbytes or 1), bar])
    share = f"{bool(nbytes):.1%}"
    totals = ["", "all", count_text(len(shards), "shard"), bytes_text(nbytes), share, ""]
    rows.append([(word, "bold") for word in totals])
    table = TextTable(("", "who", "shards", "bytes", "share", ""), rows, {3, 4}, (4, 2))
    return Page((headline(view), "bold"), "", picture, "", table)


def _rows(owners: Sequence[ShardOwner]) -> list[list[ShardOwner]]:
    """The owners of each row: one, or several neighbours with equal shares if there are many."""
    if len(owners) <= _LISTED:
        return [[owner] for owner in owners]
    runs = groupby(owners, key=lambda owner: (owner.device_types, owner.sizes))
    rows = [list(run) for _, run in runs]
    rest = [owner for row in rows[_LISTED - 1 :] for owner in row]
    return rows if len(rows) <= _LISTED else [*rows[: _LISTED - 1], rest]


def _words(row: Sequence[ShardOwner], total_bytes: int) -> tuple[str, ...]:
    first, loads = row[0], sorted(owner.n_bytes for owner in row)
    if len(row) == 1:
        share = f"{first.n_bytes / total_bytes:.1%}"
        place = f"{first.name}/{'+'.join(first.devices)}" if first.devices else first.name
        return place, _sizes_text(first.sizes), bytes_text(first.n_bytes), share
    alike = all(owner.sizes == first.sizes for owner in row)
    shards = f"each {_sizes_text(first.sizes)}" if alike else "of several sizes"
    span = " to ".join(dict.fromkeys((bytes_text(loads[0]), bytes_text(loads[-1]))))
    return owner_names(row), shards, f"{span} each", f"{sum(loads) / total_bytes:.1%}"


def _sizes_text(sizes: Sequence[tuple[int, ...]]) -> str:
    """The sizes of an owner's shards, as in ``2 x [3, 20] + [1, 20]``."""
    runs = [(list(size), len(list(run))) for size, run in groupby(sizes)]
    words = [f"{n} x {size}" if n > 1 else str(size) for size, n in runs]
    if len(words) > 3:
        words = [*words[:2], f"… ({len(sizes)} in all)"]
    return " + ".join(words) or "none"


def owner_names(owners: Iterable[ShardOwner]) -> str:
    """The owners' names, as in ``ranks 0-3, 7``, or ``trainer, ps0``."""
    owners = list(owners)
    ranks = sorted({owner.rank for owner in owners if owner.rank is not None})
    names = [owner.name for owner in owners if owner.rank is None]
    if spans := run_texts(ranks):
        names = [f"rank{'s' * (len(ranks) > 1)} {spans[0]}", *spans[1:], *names]
    return ", ".join(names if len(names) <= 6 else [*names[:5], f"… ({len(owners)} in all)"])
