"""A real rank as a participant of the protocol: a clock, registers, a view of other ranks."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import TypeVar

from tilework.comm.contract import ProcessGroup
from tilework.comm.elastic.consensus import Participant, Steps
from tilework.comm.elastic.registers import Registers, identity_key, left_key
from tilework.rendezvous.internal import has_ended

T = TypeVar("T")
#: Seconds of a pause, from the first to the longest.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02


class GroupLosses:
    """A function that returns the members of a set of ranks that have ended or left a group. A lost
    rank stays lost.
    """

    def __init__(self, group: ProcessGroup, registers: Registers) -> None:
        self._group, self._registers = group, registers
        self._lost: set[int] = set()

    def __call__(self, asked: Collection[int]) -> set[int]:
        departed = set(self._group.departed())
        for rank in set(asked) - self._lost:
            identity = self._registers.read(identity_key(rank))
            ended = identity is not None and has_ended(identity)
            if ended or rank in departed or self._registers.read(left_key(rank)) is not None:
                self._lost.add(rank)
        return self._lost.intersection(asked)


def participant_of(group: ProcessGroup, registers: Registers, patience: float) -> Participant:
    """This rank as a participant of the agreement of ``group``'s ranks."""
    losses = GroupLosses(group, registers)
    return Participant(group.rank(), registers, losses, time.monotonic, patience)


def drive(steps: Steps[T]) -> T:
    """Run the steps of a protocol to the end, sleep where they ask for a pause, and return the
    result. Blocks.
    """
    pause = _FIRST_PAUSE
    while True:
        try:
            wants_pause = next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        if wants_pause:
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)
