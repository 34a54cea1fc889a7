"""The ranks that run a captured step together, and their decision on how to run a call.

Ranks may have batches of different sizes: then a rank has a record for the call, and another rank
has none. A recorded call communicates more than a program does. Therefore ranks vote in each call,
and all of them run the program, check it, or record.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakSet, ref

import torch
from torch import Tensor

from tilework.capture.program.group_call import GroupCall
from tilework.comm import provenance_digest
from tilework.comm.contract import Options, ReduceOp
from tilework.comm.world import current_world
from tilework.dtensor.internal import stable_digest

_MOST = (1 << 60) - 1


class Way(enum.IntEnum):
    """A way to run a call of a captured step: all ranks take the highest that a rank votes for."""

    RUN = 0
    #: Run the step, and the program beside it.
    CHECK = 1
    RECORD = 2
    #: Run the step, without a record.
    UNCAPTURED = 3


class HasPrograms(Protocol):
    """An object with programs that communicate in groups."""

    def forget(self) -> None:
        """Drop all programs: the next call runs uncaptured, as the first call did."""


class _OwnersOfRank:
    """A rank's objects with programs; they forget the programs when the groups end."""

    def __init__(self) -> None:
        self.owners: WeakSet[HasPrograms] = WeakSet()

    def forget_groups(self) -> None:
        """Drop all programs. Called when the default group was replaced or closed."""
        for owner in list(self.owners):
            owner.forget()


class VotingRanks:
    """The ranks of the groups in which a captured step communicates.

    Args:
        name: The step's name.
        owner: The object that has the step's programs. Without the groups it forgets them.
    """

    def __init__(self, name: str, owner: HasPrograms) -> None:
        self._owner = ref(owner)
        self.name, self._base = name, stable_digest(name, "vote")
        #: The number of comparisons of programs so far, the same on all ranks.
        self.comparisons = 0
        #: The number of votes and of runs of programs so far, the same on all ranks.
        self._count = 0
        #: By group, the collective and the tensor of a vote.
        self._votes: dict[Any, tuple[GroupCall, Tensor]] = {}

    def add(self, groups: Sequence[Any]) -> None:
        """Add the groups of a program, on all ranks of these groups."""
        owner = self._owner()
        if groups and owner is not None:
            current_world().state(_OwnersOfRank).owners.add(owner)
        for group in groups:
            if group not in self._votes:
                call = GroupCall(group, "allreduce", Options(ReduceOp.MAX), ())
                device = getattr(group, "devices", ("cpu",))[0]
                self._votes[group] = call, torch.zeros(1, dtype=torch.int32, device=device)

    def next_run(self, bases: Sequence[int]) -> list[int]:
        """Count a run; return for each base a digest, which is the same on all ranks."""
        self._count += 1
        return [(hash((base, self._count)) & _MOST) + 1 for base in bases]

    def decide(self, mine: Way) -> Way:
        """The highest vote of the ranks. Collective over the groups that were added."""
        if not self._votes:
            return mine
        number: int = mine
        before = provenance_digest.enter(self.next_run([self._base])[0], self, None)
        try:
            for call, vote in self._votes.values():  # each group hears of the groups before
                vote.fill_(number)
                call([vote])
                number = int(vote.item())
        finally:
            provenance_digest.leave(before)
        return Way(number)

    def __str__(self) -> str:
        return f"the captured {self.name}: the vote on how to run the call"
