"""The protocol by which ranks agree on who is left, one shared access at a time.

docs/algorithms/membership.md describes the protocol, the assumptions, and the proof. The functions
here are generators: each ``yield`` stands before an access to shared state, or, if it yields True,
for a pause. Real ranks run straight through and sleep in the pauses; a model check decides after
each step who runs next, who dies and what time it is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from tilework.comm.elastic.registers import Registers

T = TypeVar("T")
#: Steps of the protocol: True asks for a pause, so that others can move first.
Steps = Generator[bool, None, T]

_YES = "yes"
_MADE, _FAILED = "made", "failed"


@dataclass(frozen=True)
class Participant:
    """A rank, numbered as in the old group, that takes part in an agreement."""

    #: This rank.
    me: int
    #: The write-once registers that all ranks share.
    registers: Registers
    #: The ranks, among the given ranks, that have surely ended or left.
    lost: Callable[[Collection[int]], set[int]]
    #: Seconds on a clock of any origin.
    clock: Callable[[], float]
    #: The longest wait, in seconds, for a rank that has not ended.
    patience: float


@dataclass(frozen=True)
class Decision:
    """The decision of a round of the agreement: the ranks that continue, and make the new group."""

    #: The number of the round.
    round: int
    #: The ranks of the new group, numbered as in the old group.
    members: tuple[int, ...]
    #: The proposer's remark, the same on all ranks.
    remark: str = ""


class Builder(Protocol):
    """An object that makes the group of a decision, and drops it if another member fails."""

    def build(self, decision: Decision) -> Steps[str | None]:
        """Make the group with the other members; return why that failed, or None."""
        ...

    def discard(self) -> None:
        """Drop the group, if this rank has made it: some member could not make it."""
        ...

    def remark(self) -> str:
        """The text that the decision carries to all members if this rank's proposal is decided."""
        ...


def survive(
    participant: Participant, candidates: Collection[int], builder: Builder, rounds: int
) -> Steps[Decision]:
    """Run rounds until the remaining ranks have made a group, perhaps without this rank; return the
    last decision.

    If this rank is a member, it has made the group; otherwise the other ranks have continued
    without it. NoGroupError after ``rounds`` rounds.
    """
    for round_ in range(1, rounds + 1):
        decision = yield from decide(participant, round_, candidates, builder.remark)
        if participant.me not in decision.members:
            return decision
        yield False
        if not failed(participant, round_):
            error = yield from builder.build(decision)
            made = yield from confirm(participant, decision, error)
            if made and error is None:
                return decision
            builder.discard()
        candidates = decision.members
    raise NoGroupError(answers(participant, decision))


class NoGroupError(Exception):
    """No round has made a group; the error's argument has the ranks' reasons."""


def decide(
    participant: Participant, round_: int, candidates: Collection[int], remark: Callable[[], str]
) -> Steps[Decision]:
    """Arrive at a round, wait for the others, and agree on the ranks that have come, of the
    candidates, which are the same on all ranks.

    The decision may lack this rank: then the others continue without it. ``remark`` makes the
    proposer's remark, once this rank is about to propose.
    """
    registers = participant.registers
    yield False
    registers.write(f"{round_}/here/{participant.me}", "")
    deadline = participant.clock() + participant.patience
    while True:
        yield False
        text = registers.read(f"{round_}/members")
        if text is not None:
            return _decision(round_, text)
        yield False
        here = [r for r in candidates if registers.read(f"{round_}/here/{r}") is not None]
        absent = set(candidates).difference(here)
        yield False
        if not absent - participant.lost(absent) or participant.clock() >= deadline:
            proposal = f"{','.join(map(str, sorted(here)))};{remark()}"
            yield False
            return _decision(round_, registers.write(f"{round_}/members", proposal))
        yield True


def failed(participant: Participant, round_: int) -> bool:
    """True if the ranks have decided that the group of round ``round_`` is not made."""
    return participant.registers.read(f"{round_}/outcome") == _FAILED


def confirm(participant: Participant, decision: Decision, error: str | None) -> Steps[bool]:
    """Agree on whether all members have made the group of a round: True on all ranks, or False on
    all ranks, and then no rank uses it. ``error`` is the reason why this rank could not; None if it
    could.
    """
    registers, round_, members = participant.registers, decision.round, decision.members
    yield False
    registers.write(f"{round_}/made/{participant.me}", _YES if error is None else f"no: {error}")
    deadline = participant.clock() + participant.patience
    while True:
        yield False
        outcome = registers.read(f"{round_}/outcome")
        if outcome is not None:
            return outcome == _MADE
        yield False
        answers = {rank: registers.read(f"{round_}/made/{rank}") for rank in members}
        missing = {rank for rank, answer in answers.items() if answer is None}
        refused = any(answer not in (None, _YES) for answer in answers.values())
        yield False
        if not missing and not refused:
            return registers.write(f"{round_}/outcome", _MADE) == _MADE
        if refused or participant.lost(missing) or participant.clock() >= deadline:
            yield False
            return registers.write(f"{round_}/outcome", _FAILED) == _MADE
        yield True


def answers(participant: Participant, decision: Decision) -> dict[int, str]:
    """Members' reasons why they could not make the group, by rank."""
    read, round_ = participant.registers.read, decision.round
    texts = {rank: read(f"{round_}/made/{rank}") for rank in decision.members}
    return {rank: text[4:] for rank, text in texts.items() if text is not None and text != _YES}


def _decision(round_: int, text: str) -> Decision:
    ranks, _, remark = text.partition(";")
    members = tuple(int(rank) for rank in ranks.split(",") if rank)
    return Decision(round_, members, remark)
