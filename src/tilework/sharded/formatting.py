"""Owners of a sharded tensor's shards: a line for repr(), a text with a picture for print()."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from tilework.sharded.metadata import ShardedTensorMetadata, ShardMetadata
from tilework.sharded.specs import ChunkShardingSpec, ShardingSpec
from tilework.tiled import COLOURS, Line, PictureSize, bytes_text, draw

#: The size for print(), which does not know the terminal.
_PLAIN = PictureSize(width=64, height=9, rows=6, slices=2)


@dataclass(frozen=True)
class ShardOwner:
    """A rank or worker, and the shards that it owns.

    Attributes:
        name: The name that is shown, such as ``rank 0``.
        rank: The global rank; None for a worker that is known only by name.
        devices: The devices of the shards.
        shards: The metadata of the shards.
        n_bytes: The bytes of all shards.
    """

    name: str
    rank: int | None
    devices: tuple[str, ...]
    shards: tuple[ShardMetadata, ...]
    n_bytes: int

    @property
    def place(self) -> str:
        """The owner's name and devices."""
        return f"{self.name}/{'+'.join(self.devices)}" if self.devices else self.name

    @property
    def device_types(self) -> set[str]:
        """The types of the owner's devices."""
        return {device.partition(":")[0] for device in self.devices}

    @property
    def sizes(self) -> list[tuple[int, ...]]:
        """The sizes of the owner's shards."""
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

    @property
    def total_bytes(self) -> int:
        """Bytes of the full tensor."""
        return math.prod(self.metadata.size) * self.metadata.tensor_properties.dtype.itemsize

    def colour_of(self, shard: ShardMetadata) -> str:
        """The name of the colour in which the shard's owner is shown; owners take turns."""
        names = [owner.name for owner in self.owners]
        return COLOURS[names.index(_owner_name(shard)) % len(COLOURS)]

    def picture(self, size: PictureSize) -> list[Line]:
        """The shards, as lines of text."""
        shards = self.metadata.shards_metadata
        labels = [(str(s.placement or "?"), _owner_name(s).removeprefix("rank:")) for s in shards]
        return draw(self.metadata.size, [shard.box for shard in shards], labels, size)


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
    """All owners of shards, empty shards included: ranks in order, then workers."""
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
    """A line with dtype, size, shards and owners. Shown by repr().

    Example:
        >>> from tilework.sharded import ChunkShardingSpec, zeros
        >>> from tilework.testing import run_ranks
        >>> spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        >>> run_ranks(2, lambda rank: zeros(spec, 10, 20))[0]
        ShardedTensor(float32[10, 20] in 2 chunks along dim 0 on ranks 0-1)
    """
    properties, n = view.metadata.tensor_properties, len(view.metadata.shards_metadata)
    dtype = str(properties.dtype).removeprefix("torch.")
    shards = f"shard{'s' * (n != 1)}"
    if isinstance(view.spec, ChunkShardingSpec):
        shards = f"chunk{'s' * (n != 1)} along dim {view.spec.dim % len(view.metadata.size)}"
    holders = [owner for owner in view.owners if owner.shards]
    devices = set[str]().union(*(owner.device_types for owner in holders)) - {"cpu"}
    on = f" ({', '.join(sorted(devices))})" if devices else ""
    gradient = ", requires_grad" if properties.requires_grad else ""
    what = f"{view.name}{dtype}{list(view.metadata.size)}"
    return f"{what} in {n} {shards} on {owner_names(holders)}{on}{gradient}"


def as_text(view: Overview) -> str:
    """The headline, the picture, and the bytes of the ranks. Shown by print()."""
    picture = ["".join(text for text, _ in line) for line in view.picture(_PLAIN)]
    total = f"{bytes_text(view.total_bytes)}: {_loads(view)}"
    return "\n".join([headline(view), *picture, total])


def owner_names(owners: Iterable[ShardOwner]) -> str:
    """The owners' names, as in ``ranks 0-3, 7``, or ``trainer, ps0``."""
    owners = list(owners)
    ranks = sorted({owner.rank for owner in owners if owner.rank is not None})
    names = [owner.name for owner in owners if owner.rank is None]
    if ranks:
        names = [f"rank{'s' * (len(ranks) > 1)} {_spans(ranks)[0]}", *_spans(ranks)[1:], *names]
    return ", ".join(names if len(names) <= 6 else [*names[:5], f"… ({len(owners)} in all)"])


def _spans(ranks: Sequence[int]) -> list[str]:
    """The sorted ``ranks`` as texts, with consecutive numbers joined, as in ``0-3``."""
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(ranks), key=lambda item: item[1] - item[0])
    ]
    return [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]


def _loads(view: Overview) -> str:
    """Text: the bytes that each owner holds, or least and most if there are many values."""
    by_load: dict[int, list[ShardOwner]] = {}
    for owner in view.owners:
        by_load.setdefault(owner.n_bytes, []).append(owner)
    if len(by_load) > 4:
        least, most = bytes_text(min(by_load)), bytes_text(max(by_load))
        return f"{least} to {most} on {owner_names(view.owners)}"
    return ", ".join(
        f"{bytes_text(n) if n else 'nothing'} on {owner_names(owners)}"
        for n, owners in by_load.items()
    )
