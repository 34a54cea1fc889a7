"""Snapshots of a state: in each step each rank writes a part."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup
from tilework.comm.operations.internal import agree, load_plain
from tilework.parallel.resilient.catalog import (
    Catalog,
    Described,
    SnapshotPart,
    make_catalog,
    merged,
)
from tilework.parallel.resilient.slots import SLOTS, AreaLayout, Slots, make_slots
from tilework.parallel.resilient.tracked import Contents, FoundTensor, State, Tracked, contents_of

#: Room for plain data: the minimum in bytes, and the factor of the current size.
_LEAST_PLAIN, _PLAIN_ROOM = 32 << 10, 2


@dataclass(frozen=True, slots=True)
class _Share:
    """A part that this rank writes: the tensor, the local tile, and the place in a slot."""

    #: The index of the tensor in ``Snapshots._tracked``.
    tracked: int
    #: The index of the tile among this rank's tiles of the tensor.
    position: int
    part: SnapshotPart
    dtype: torch.dtype


class Snapshots:
    """The snapshots of one state on one group. Construction is collective, and writes nothing.

    Args:
        replicas: The ranks besides the writer that keep each part, where memory is not shared.
        shared: Use shared memory where all ranks can.
        generation: The generation of the last snapshots that this rank knows of; these snapshots
            have a later number, the same on all ranks.
    """

    def __init__(
        self,
        state: State,
        group: ProcessGroup,
        replicas: int,
        shared: bool,
        seats: tuple[int, ...],
        generation: int = 0,
    ) -> None:
        self.state, self.rank, self.seats = state, group.rank(), seats
        self._authenticated = group.authenticated
        contents = contents_of(state)
        self._tracked = [Tracked(found) for found in contents.tensors]
        own = [tracked.described() for tracked in self._tracked]
        plain = len(self._packed(contents))
        reports = agree(lambda: (own, plain, generation), group)
        self.generation = 1 + max(report[2] for report in reports)
        #: All tensors of the state, the same on every rank.
        self.described: list[Described] = merged([report[0] for report in reports])
        self.catalog: Catalog = make_catalog(self.described, group.size())
        room = max(_LEAST_PLAIN, _PLAIN_ROOM * max(report[1] for report in reports))
        layout = AreaLayout(self.catalog.slot_bytes, room)
        self.slots: Slots = make_slots(layout, replicas, group, shared)
        self._count = 0
        self._shares = self._own_shares()
        self._targets: list[list[Tensor] | None] = [None] * SLOTS
        self._next_plain = b""

    def _own_shares(self) -> list[_Share]:
        numbers = {tracked.name: number for number, tracked in enumerate(self._tracked)}
        shares = []
        for entry in self.catalog.entries:
            number = numbers.get(entry.name)
            if number is None:
                continue
            places = self._tracked[number].tiling.of(self.rank)
            shares += [
                _Share(number, places.index(part.tile), part, entry.dtype)
                for part in entry.parts
                if part.writer == self.rank
            ]
        return shares

    def fits(self) -> bool:
        """True if the state still has the same tensors, and the plain data have room. Local.

        Call it before each :meth:`write`: it looks up the tensors to write.

        Raises:
            ValueError: A tensor outside of optimizers has come, gone, or changed in shape or dtype:
                the tensors that ``build()`` makes could not hold the copy.
        """
        contents = contents_of(self.state)
        self._next_plain = self._packed(contents)
        room = len(self._next_plain) <= self.slots.layout.plain_bytes
        return self._are_alike(contents.tensors) and room

    def _are_alike(self, tensors: Sequence[FoundTensor]) -> bool:
        """True if ``tensors`` have the names, dtypes and layouts of the tensors tracked so far."""
        if len(tensors) == len(self._tracked) and all(
            found.tensor is tracked.found.tensor and found.tensor.shape == tracked.tiling.shape
            for found, tracked in zip(tensors, self._tracked, strict=True)
        ):
            return True
        _check_built(self._tracked, tensors)
        if [found.facts for found in tensors] != [tracked.facts for tracked in self._tracked]:
            return False
        for tracked, found in zip(self._tracked, tensors, strict=True):
            tracked.found = found
        return True

    def _packed(self, contents: Contents) -> bytes:
        return pack(contents.plain, self._authenticated)

    def write(self, steps: int) -> None:
        """Write this rank's part of the state after ``steps`` steps. Blocks for the copies."""
        slot = self._count % SLOTS
        self._count += 1
        self.slots.begin(slot)
        sources = self._sources()
        targets = self._targets[slot]
        if targets is None:
            memory = self.slots.tensor_bytes(self.rank, slot)
            targets = [part_view(memory, share.part, share.dtype) for share in self._shares]
            self._targets[slot] = targets
        if targets:
            torch._foreach_copy_(targets, sources)
        self.slots.finish(slot, steps, self._next_plain)

    def _sources(self) -> list[Tensor]:
        locals_: dict[int, list[Tensor]] = {}
        sources = []
        for share in self._shares:
            tracked = self._tracked[share.tracked]
            if share.tracked not in locals_:
                locals_[share.tracked] = tracked.locals()
            tile = tracked.tiling.tiles[share.part.tile].box
            local = locals_[share.tracked][share.position]
            box = share.part.box
            sources.append(local if box == tile else local[box.relative_to(tile).slices])
        return sources

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self._targets = [None] * SLOTS
        self.slots.close()


def part_view(memory: Tensor, part: SnapshotPart, dtype: torch.dtype) -> Tensor:
    """The tensor of a part, a view of the bytes in the writer's slot."""
    nbytes = part.box.volume * dtype.itemsize
    return memory[part.offset : part.offset + nbytes].view(dtype).view(part.box.sizes)


def _check_built(tracked: Sequence[Tracked], tensors: Sequence[FoundTensor]) -> None:
    """Raise if the state has other tensors than ``build()`` has made."""
    before = {each.name: each.facts[:2] for each in tracked if not each.found.of_optimizer}
    now = {found.name: found.facts[:2] for found in tensors if not found.of_optimizer}
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            raise ValueError(
                f"{name} was {_words(before.get(name))} when the state was built, and is "
                f"{_words(now.get(name))} after a step, and could not be restored: build() must "
                f"make all tensors in their final shapes; state that grows belongs in an "
                f"object with state_dict() and load_state_dict()"
            )


def _words(facts: tuple[Any, ...] | None) -> str:
    return "missing" if facts is None else f"{str(facts[1]).removeprefix('torch.')} {[*facts[0]]}"


def pack(plain: Mapping[str, Any], trusted: bool) -> bytes:
    """Plain data, by the name of their owner in the state, as bytes. Any class is allowed if only
    ranks of the job can read them; else those that others cannot read raise TypeError.
    """
    try:
        data = pickle.dumps(plain, pickle.HIGHEST_PROTOCOL)
        if not trusted:
            load_plain(data)
    except Exception as error:
        if len(plain) > 1:
            for name, value in plain.items():
                pack({name: value}, trusted)  # raises for the culprit
        raise TypeError(
            f"state[{next(iter(plain))!r}] has a value that another rank could not read "
            f"({error}): let state_dict() give only plain data and tensors"
        ) from error
    return data


def unpack(data: bytes, trusted: bool) -> Any:
    """The plain data from the bytes of :func:`pack`."""
    return pickle.loads(data) if trusted else load_plain(data)
