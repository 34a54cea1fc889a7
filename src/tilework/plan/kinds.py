"""The kinds of ranks: those that do the same, on shards of the same sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tilework.comm.per_call.internal import PretendedCall
from tilework.layout import chunk_sizes
from tilework.mesh import MeshSpec

#: The most places along an axis of messages that all are kinds of their own.
_MOST_STAGES = 64


@dataclass(frozen=True)
class PlacedMesh:
    """A mesh that a rank has made."""

    spec: MeshSpec
    #: By axis, the ranks of the group through this rank.
    lines: tuple[frozenset[int], ...]
    #: By axis, the sizes of shards along it, of each layout on the mesh.
    splits: tuple[frozenset[tuple[int, ...]], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The axes' names, or their numbers."""
        return self.spec.names or tuple(map(str, range(len(self.spec.shape))))

    @classmethod
    def of(cls, mesh: Any, rank: int) -> PlacedMesh:
        """The facts about a mesh through ``rank``."""
        splits: list[set[tuple[int, ...]]] = [set() for _ in mesh.spec.shape]
        for spec in list(mesh.specs.values()):
            for axis, placement in enumerate(getattr(spec, "placements", ())):
                if placement.is_shard():
                    length = mesh.spec.shape[axis]
                    sizes = placement.sizes or chunk_sizes(spec.shape[placement.dim], length)
                    splits[axis].add(tuple(sizes))
        lines = [frozenset(mesh.spec.line(axis, rank)) for axis in range(len(mesh.spec.shape))]
        return cls(mesh.spec, tuple(lines), tuple(map(frozenset, splits)))


def axis_of(meshes: Iterable[PlacedMesh], ranks: Sequence[int]) -> str:
    """The axis of a mesh that a group runs along; "world" for other groups."""
    members = frozenset(ranks)
    found = [
        name
        for mesh in meshes
        for name, line in zip(mesh.names, mesh.lines, strict=True)
        if line == members and len(line) > 1
    ]
    return found[0] if found else "world"


def kinds_of(
    meshes: Sequence[PlacedMesh], calls: Iterable[PretendedCall], ranks: int, alike: bool = False
) -> list[int]:
    """The ranks to run for each kind to run, once rank 0 has run. Ascending.

    Kinds are the first rank along an axis, the last, those whose shard has another size than the
    shard before, and each rank along an axis on which messages travel (stages of a pipeline). Along
    the other axes they are the first, and the last.

    Args:
        meshes: The meshes of rank 0.
        calls: The calls of rank 0.
        ranks: The number of ranks.
        alike: True if ranks at whose places shards are equal do the same: then the first is enough.
    """
    found = {0} if alike else {0, min(1, ranks - 1), ranks - 1}
    groups = {call.ranks for call in calls if call.peer is not None}
    by_messages = {axis_of(meshes, group) for group in groups}
    if "world" in by_messages:
        found |= set(range(min(ranks, _MOST_STAGES)))
    for mesh in meshes:
        for axis, (name, length) in enumerate(zip(mesh.names, mesh.spec.shape, strict=True)):
            places = {0, 0 if alike else length - 1, *_borders(mesh.splits[axis], length)}
            if name in by_messages:
                places |= set(range(min(length, _MOST_STAGES)))
            for place in places:
                first = [0] * len(mesh.spec.shape)
                last = [0 if alike else n - 1 for n in mesh.spec.shape]
                first[axis] = last[axis] = place
                found |= {mesh.spec.at(first), mesh.spec.at(last)}
    return sorted(found)


def _borders(splits: Iterable[Sequence[int]], length: int) -> set[int]:
    """The places at which a shard has another size than at the place before."""
    return {
        place
        for sizes in splits
        for place in range(1, min(len(sizes), length))
        if sizes[place] != sizes[place - 1]
    }
