"""Agreement of ranks on a program: all ranks of a group have the group's collectives in one order.

Ranks compare once, when a program is made. Ranks with different shards have different local
operators; therefore they compare their communication: by group, the operations, reductions, dtypes
and lines. Each collective of a run then carries a digest of that text, the number of the run, and
the number of the collective: if a rank runs another program, or none, the first collective raises.
Ranks may run programs for different sizes together, if these have the same communication.

A rank may have a record for a call that another rank has no record for, and a recorded call
communicates more than a program does. Therefore ranks vote in each call, and all of them run the
program, check it, or record.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from math import prod
from typing import Any, Protocol
from weakref import WeakSet, ref

import torch
from torch import Tensor

from tilework.capture.program.graph import Expected, Graph, Hole, Instruction, Value, values_in
from tilework.capture.program.group_call import GroupCall
from tilework.comm import provenance_digest
from tilework.comm.contract import Options, ProcessGroup, ReduceOp
from tilework.comm.operations.internal import agree
from tilework.comm.world import current_world
from tilework.dtensor.internal import stable_digest
from tilework.errors import CaptureError

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
    """The ranks of a step's groups; without the groups ``owner`` forgets the step's programs."""

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


#: The kind of a message, the other rank in the group, tag, dtype, elements and line.
_Message = tuple[str, int, Any, str, int, str]
#: Added to the digests of messages, to differ from collectives.
_MESSAGES = 1 << 40


@dataclass
class Digests:
    """The digests of a program's collectives, for each group in the order of the program.

    Attributes:
        bases: A digest of all of a group's collectives.
        collectives: The texts of a group's collectives, in order.
        ranks: The ranks that run the step.
        number: The number of the comparison, the same on all ranks.
    """

    bases: list[int]
    collectives: list[list[str]]
    ranks: VotingRanks
    number: int

    def of_next_run(self) -> list[int]:
        """Count a run; return for each group the digest of the run's first collective."""
        return self.ranks.next_run(self.bases)


def compare_program(
    graph: Graph, name: str, ranks: VotingRanks, joins: int | None = None
) -> tuple[Digests, bool]:
    """Compare a program with other ranks' programs. Collective over each group of the program.

    ``joins`` is the number of the earlier program that this rank's record may run; None: a new
    program. ``keeps_order`` becomes False if it is on another rank, and ``votes_last`` True.

    Returns:
        The digests of a new program; and True if all ranks may run the same earlier program.

    Raises:
        CaptureError: On every rank of a group: ranks have different collectives of the group.
    """
    sent: dict[ProcessGroup, tuple[list[str], list[_Message]]] = {}
    for each in graph.instructions:
        if isinstance(each.target, GroupCall):
            collectives, messages = sent.setdefault(each.target.group, ([], []))
            if each.target.is_point_to_point:
                messages.append(_message(each))
            else:
                collectives.append(_text(each))
    bases, graph.votes_last = [], _branches_last(graph)
    for group, mine in sent.items():
        number = -1 if joins is None else joins
        told: tuple[Any, ...] = number, (graph.keeps_order, graph.votes_last), *mine
        gathered = agree(partial(tuple, told), group)
        # Group by group, for ranks of a mesh that share no group to come to the same answer.
        joins = joins if all(number == joins for number, *_ in gathered) else None
        graph.keeps_order = all(keeps for _, (keeps, _), *_ in gathered)
        graph.votes_last = any(votes for _, (_, votes), *_ in gathered)
        _refuse_different([x for *_, x, _ in gathered], group.global_ranks, name)
        _refuse_unpaired([x for *_, x in gathered], group.global_ranks, name)
        # Without the numbers of elements: programs of several sizes have equal digests.
        texts = [str([(*x[:4], x[5]) for x in messages]) for *_, messages in gathered if messages]
        bases.append(stable_digest("\n".join([name, *mine[0], *texts])))
    ranks.add(list(sent))
    ranks.comparisons += 1
    every = [collectives for collectives, _ in sent.values()]
    return Digests(bases, every, ranks, ranks.comparisons), joins is not None


def digest_offsets(graph: Graph) -> list[int]:
    """For each instruction, the number that it adds to a call's digest.

    Collectives of a group are numbered in order, and messages of two ranks in order: so both ranks
    of a message have one number.
    """
    counts: dict[Any, int] = {}
    offsets = []
    for each in graph.instructions:
        call: Any = each.target
        key: Any = None
        first = 0
        if isinstance(call, GroupCall):
            key = call.group
            if call.is_point_to_point:
                first, (kind, peer, *_) = _MESSAGES, _message(each)
                key = call.group, kind, peer
        offsets.append(first + counts.get(key, 0))
        counts[key] = counts.get(key, 0) + 1
    return offsets


def _branches_last(graph: Graph) -> bool:
    """True if the program communicates, and branches later on a value that ranks may not share.

    With a single group the result of an all_reduce is the same on all ranks.
    """
    calls = [each for each in graph.instructions if isinstance(each.target, GroupCall)]
    if not calls:
        return False
    last, is_single = calls[-1], len({call.target.group for call in calls}) == 1
    shared: dict[int, Any] = {}  # by value that is the same on all ranks, the memory
    is_after = False
    for each in graph.instructions:
        is_after |= each is last
        if isinstance(each.target, Expected):
            if is_after and not all(x.number in shared for x in each.inputs()):
                return True
            continue
        shared = {n: memory for n, memory in shared.items() if memory not in each.writes}
        if is_single and getattr(each.target, "method", "") == "allreduce":
            shared.update((x.number, x.memory) for x in each.inputs())
    return False


def _refuse_different(every: list[list[str]], ranks: Sequence[int], name: str) -> None:
    for other, theirs in enumerate(every):
        if theirs == every[0]:
            continue
        number = next(
            (i for i, (a, b) in enumerate(zip(every[0], theirs, strict=False)) if a != b),
            min(len(every[0]), len(theirs)),
        )
        sides = [
            texts[number] if number < len(texts) else "nothing" for texts in (every[0], theirs)
        ]
        raise CaptureError(
            f"ranks recorded different programs of {name}: collective {number} is {sides[0]} "
            f"on rank {ranks[0]} and {sides[1]} on rank {ranks[other]}. All ranks of a group "
            f"have to call the same collectives, in one order: look for a branch on the rank "
            f"or on data"
        )


def _refuse_unpaired(every: list[list[Any]], ranks: Sequence[int], name: str) -> None:
    """Check that each rank receives the messages that other ranks send to it."""
    for source, target in permutations(range(len(every)), 2):
        out = [x[2:5] for x in every[source] if x[:2] == ("send", target)]
        into = [x[2:5] for x in every[target] if x[:2] == ("recv", source)]
        if out != into and not any(x[0] == "recv_anysource" for x in every[target]):
            raise CaptureError(
                f"ranks recorded different programs of {name}: rank {ranks[source]} sends to rank "
                f"{ranks[target]} (tag, dtype, elements) {out}, and rank {ranks[target]} receives "
                f"{into}: each send needs a receive, in one order"
            )


def _message(each: Instruction) -> _Message:
    """The kind of a message, the other rank in the group, tag, dtype, elements and line."""
    call: Any = each.target
    value = next(values_in(each.args))
    dtype = str(value.dtype).removeprefix("torch.")
    is_known = call.method != "recv_anysource"
    peer, tag = call.others if is_known else (-1, call.others[-1:])
    elements = prod(x.example if isinstance(x, Hole) else x for x in value.shape)
    return call.method, peer, tag, dtype, elements, each.site


def _text(each: Instruction) -> str:
    call: Any = each.target
    values: list[Value] = list(values_in(each.args))
    dtype = str(values[0].dtype).removeprefix("torch.") if values else ""
    return f"{call.method} ({call.opts.reduceOp}) of {dtype} at {each.site}"
