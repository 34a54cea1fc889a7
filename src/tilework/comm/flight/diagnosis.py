"""Findings from all ranks' records: which rank waits for which other, and why. Reads no files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from tilework.comm.flight.document import Record
from tilework.comm.flight.history import (
    Group,
    History,
    Wait,
    blocking,
    circles,
    failed,
    is_send,
    named,
    stuck,
    waits,
)
from tilework.comm.flight.ring import ANY_PEER, FAILED, RUNNING, Entry
from tilework.comm.flight.stragglers import Straggler, own_times, slowest, stragglers, without
from tilework.wait_graph import IN_A_CIRCLE

#: In the order of reports.
Kind = Literal[
    "deadlock", "mismatch", "failed", "waiting", "message", "busy", "unheard", "slow", "fine"
]
_MAX_DETAILS: Final = 64
#: The most ranks that are described separately.
_MAX_TOLD: Final = 16
#: The most waits that are reported of one rank.
_MAX_WAITS: Final = 4


@dataclass(frozen=True)
class Finding:
    """A conclusion from the records, for a person."""

    kind: Kind
    """The kind of the conclusion."""
    text: str
    """One sentence."""
    details: tuple[str, ...] = ()
    """Further lines."""
    group: str = ""
    """The name of the group; empty if the finding is not about a group."""
    number: int = 0
    """The number of the operation; 0 for messages, and without an operation."""
    ranks: tuple[int, ...] = ()
    """The global ranks that the finding is about, such as ranks that wait or failed."""
    awaited: tuple[int, ...] = ()
    """The global ranks that they wait for."""


def diagnose(records: Mapping[int, Record]) -> list[Finding]:
    """The findings in the records of a job, of which some may be missing, by rank; at least one."""
    history = History(records)
    return [*_Telling(history).findings(), *_slow_ranks(history)]


def _slow_ranks(history: History) -> Iterator[Finding]:
    everything = {
        rank: [entry for log in record.groups for entry in log.entries]
        for rank, record in history.records.items()
    }
    groups: dict[Straggler, str] = {}
    for group in history.groups:
        times = {
            rank: own_times([*calls.values()], without(everything[rank], calls.values()))
            for rank, calls in group.calls.items()
        }
        groups.update(dict.fromkeys(stragglers(times), group.name))
    for straggler in slowest(groups):
        yield Finding("slow", f"{straggler}.", group=groups[straggler], ranks=(straggler.rank,))


class _Telling:
    """Makes findings, in words, from the history of all ranks."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._waits = waits(history)
        self._held_up = blocking(history, self._waits)

    def findings(self) -> Iterator[Finding]:
        """The findings: causes before possible consequences."""
        rings = circles(self._held_up)
        findings = [self._deadlock(ring) for ring in rings]
        in_rings = {(wait.group.name, wait.entry.number) for ring in rings for wait in ring}
        for group in self._history.groups:
            operation = self._operation(group)
            if operation is not None and (group.name, operation.number) not in in_rings:
                findings.append(operation)
        in_ring = {id(wait) for ring in rings for wait in ring}
        findings += self._messages([wait for wait in self._waits if id(wait) not in in_ring])
        order: tuple[Kind, ...] = ("deadlock", "mismatch", "failed", "waiting", "message", "busy")
        yield from sorted(findings, key=lambda finding: order.index(finding.kind))
        yield from self._unheard(findings)
        if not findings:
            yield self._fine()

    # -- kinds of findings ---------------------------------------------------------------

    def _deadlock(self, ring: Sequence[Wait]) -> Finding:
        ranks = [wait.rank for wait in ring]
        details = [
            f"rank {wait.rank} waits in {wait.place}, {_call(wait.entry)}, for rank {after}"
            for wait, after in zip(ring, [*ranks[1:], ranks[0]], strict=True)
        ]
        text = f"deadlock: {named(ranks)} {IN_A_CIRCLE}"
        first = ring[0]
        number = first.entry.number
        return Finding("deadlock", text, tuple(details), first.group.name, number, tuple(ranks))

    def _operation(self, group: Group) -> Finding | None:
        """A finding about the first collective that failed, is stuck or differs; else None."""
        diverged, stopped = group.first_divergence(), group.first_stuck()
        if diverged is not None and (stopped is None or diverged <= stopped):
            return self._mismatch(group, diverged)
        return None if stopped is None else self._stopped(group, stopped)

    def _mismatch(self, group: Group, number: int) -> Finding:
        entries = group.at(number)
        text = f"group {group.name!r}, operation #{number}: ranks called different things"
        details = [*_by_call(entries), *self._whereabouts(group, number)]
        before = next(iter(group.at(number - 1).values()), None)
        if before is not None:
            details.append(f"before that they agreed on #{number - 1}, {_call(before)}")
        return Finding("mismatch", text, tuple(details), group.name, number, tuple(entries))

    def _stopped(self, group: Group, number: int) -> Finding:
        entries = {rank: entry for rank, entry in group.at(number).items() if stuck(entry)}
        absent = group.absent(number)
        anyone_failed = any(map(failed, entries.values()))
        waits = "waits in" if len(entries) == 1 else "wait in"
        verb = "failed in" if anyone_failed else waits
        calls = _by_call(entries)
        one_call = len(calls) == 1
        whom = calls[0].replace(": ", f" {verb} ", 1) if one_call else f"{named(entries)} {verb} it"
        text = f"group {group.name!r}, operation #{number}: {whom}{self._missing(absent)}"
        details = [] if one_call else calls
        details += _failures(entries)
        details += self._whereabouts(group, number)
        if not absent and not anyone_failed:
            left = sorted(set(group.at(number)) - set(entries))
            words = f"; {named(left)} {_verb_of(left, 'is', 'are')} done with it" if left else ""
            details.append(f"all ranks have come, so data is moving, or a rank stopped{words}")
        kind: Kind = "failed" if anyone_failed else "waiting" if absent else "busy"
        waiting = tuple(entries)
        return Finding(kind, text, tuple(details), group.name, number, waiting, tuple(absent))

    def _messages(self, all_waits: Sequence[Wait]) -> Iterator[Finding]:
        """A finding for each set of messages of equal group, ranks, direction and site."""
        alike: dict[tuple[object, ...], list[Wait]] = {}
        for wait in all_waits:
            entry = wait.entry
            if entry.peer is not None:
                end = (id(wait.group), wait.rank, entry.peer, is_send(entry), bool(wait.awaited))
                alike.setdefault((*end, entry.site, failed(entry)), []).append(wait)
        for waits_alike in alike.values():
            yield self._message(waits_alike[0], len(waits_alike) - 1)

    def _message(self, wait: Wait, more: int) -> Finding:
        entry, rank = wait.entry, wait.rank
        state = "failed" if failed(entry) else "waits"
        text = f"group {wait.group.name!r}: rank {rank} {state} in {_call(entry)}"
        text += f", and in {more} more like it" if more else ""
        details = _failures({rank: entry})
        if not wait.awaited:
            return Finding(
                "busy", f"{text}; the other end is there", (), wait.group.name, 0, (rank,)
            )
        if entry.peer != ANY_PEER:
            done = "received" if is_send(entry) else "sent"
            text += f"; rank {entry.peer} has not {done} it"
            details += self._other_tags(wait)
        details += [self._where(peer, wait.group) for peer in wait.awaited[:_MAX_TOLD]]
        kind: Kind = "failed" if failed(entry) else "message"
        return Finding(kind, text, tuple(details), wait.group.name, 0, (rank,), wait.awaited)

    def _unheard(self, findings: Sequence[Finding]) -> Iterator[Finding]:
        mentioned = {rank for finding in findings for rank in finding.awaited}
        silent = [rank for rank in self._history.unheard if rank not in mentioned]
        if silent:
            text = (
                f"{named(silent)} left no record: {_verb_of(silent, 'it is', 'they are')} {_GONE}"
            )
            yield Finding("unheard", text, (), ranks=tuple(silent))

    def _fine(self) -> Finding:
        recorded = tuple(self._history.records)
        who = f"{named(recorded)} are" if self._history.unheard else "every rank is"
        text = f"{who} outside of operations: nobody waits for another"
        details = [self._where(rank, None) for rank in recorded[:_MAX_DETAILS]]
        return Finding("fine", text, tuple(details), ranks=recorded)

    # -- where ranks are -----------------------------------------------------------------

    def _whereabouts(self, group: Group, number: int) -> list[str]:
        absent = group.absent(number)
        lines = [self._where(rank, group) for rank in absent[:_MAX_TOLD]]
        if len(absent) > _MAX_TOLD:
            lines.append(f"and {len(absent) - _MAX_TOLD} more")
        return lines

    def _missing(self, absent: Sequence[int]) -> str:
        """The end of a headline: the awaited ranks ``absent`` as late, lost or without a record."""
        lost = [rank for rank in absent if self._is_lost(rank)]
        silent = [rank for rank in absent if self._is_silent(rank)]
        late = [rank for rank in absent if rank not in lost and rank not in silent]
        words = [
            f"{named(late)} {_verb_of(late, 'has', 'have')} not come" if late else "",
            f"{named(lost)} {_verb_of(lost, 'is', 'are')} lost" if lost else "",
            f"nothing is known of {named(silent)}" if silent else "",
        ]
        return "".join(f"; {word}" for word in words if word)

    def _is_lost(self, rank: int) -> bool:
        return rank not in self._history.records and rank in self._history.lost

    def _is_silent(self, rank: int) -> bool:
        return rank not in self._history.records and rank not in self._history.lost

    def _where(self, rank: int, group: Group | None) -> str:
        """A line on the state of ``rank``, with the last collective in ``group`` or in any."""
        if self._is_lost(rank):
            return f"rank {rank} left no record; the others saw it die or leave"
        record = self._history.records.get(rank)
        if record is None:
            return f"rank {rank} left no record: it is {_GONE}"
        parts = [self._last_call(record, group)]
        running = [w for w in self._held_up.get(rank, []) if w.entry.outcome == RUNNING]
        shown = running[:_MAX_WAITS]
        parts += [f"it waits in {wait.place}, {_call(wait.entry)}" for wait in shown]
        parts += [f"and in {len(running) - len(shown)} more"] if len(running) > len(shown) else []
        parts += [f'it said "{_first_line(fault.text)}"' for fault in record.faults[:1]]
        if len(parts) == 1 and record.stacks:
            stack = record.stacks[0]
            parts.append(f"its Python stack is at {stack.site or ''.join(stack.frames[:1])}")
        return f"rank {rank} {'; '.join(parts)}"

    def _last_call(self, record: Record, group: Group | None) -> str:
        if group is None:
            ends = [g for g in self._history.groups if record.rank in g.calls]
            lasts = [last for g in ends if (last := g.last(record.rank))]
            last = max(lasts, key=lambda entry: entry.entered, default=None)
        else:
            last = group.last(record.rank)
        if last is None:
            known = group is None or record.rank in group.calls
            return (
                "has entered no collective yet" if known else "has not made the group, or left it"
            )
        return f"was last in #{last.number} {_call(last)}, {_ending(last, record)}"

    def _other_tags(self, wait: Wait) -> list[str]:
        """A line if a message of the peer differs from ``wait`` only in the tag."""
        entry = wait.entry
        wanted = "recv" if is_send(entry) else "send"
        others = [
            other
            for other in wait.group.messages.get(entry.peer or 0, ())
            if other.what.startswith(wanted) and other.peer == wait.rank and other.tag != entry.tag
        ]
        last = others[-1:]
        return [f"rank {entry.peer} called {_call(o)}: the tags must be equal" for o in last]


_GONE: Final = "dead, stopped, or was not asked"


def _call(entry: Entry) -> str:
    return f"{entry.what} at {entry.site}" if entry.site else entry.what


def _by_call(entries: Mapping[int, Entry]) -> list[str]:
    """A line for each different call in ``entries``, with the ranks that made the call."""
    ranks: dict[str, list[int]] = {}
    for rank, entry in sorted(entries.items()):
        ranks.setdefault(_call(entry), []).append(rank)
    return [f"{named(who)}: {call}" for call, who in ranks.items()][:_MAX_DETAILS]


def _failures(entries: Mapping[int, Entry]) -> list[str]:
    """A line on the first failure, whose consequences the others are; empty without any."""
    lines = [
        f'rank {rank} said "{_first_line(entry.outcome.removeprefix(FAILED))}"'
        for rank, entry in sorted(entries.items(), key=lambda item: _causality(item[1]))
        if failed(entry)
    ]
    return lines[:1]


def _causality(entry: Entry) -> tuple[bool, float]:
    """A key that sorts original failures before aborts by other ranks, and then by time."""
    return "aborted by rank" in entry.outcome, entry.ended or 0.0


def _ending(entry: Entry, record: Record) -> str:
    if entry.outcome == RUNNING:
        return "which still runs"
    how = "which failed" if failed(entry) else "done"
    if entry.ended is None:
        return how
    return f"{how} {max(0.0, record.written - entry.ended):.1f} s before"


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _verb_of(ranks: Sequence[int], one: str, several: str) -> str:
    return one if len(ranks) == 1 else several
