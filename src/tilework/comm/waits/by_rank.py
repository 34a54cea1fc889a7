"""The waits of this rank's thread for others, and the functions that look at long waits.

tilework's own engines call these functions repeatedly while a thread waits: engines in Python by
:func:`look_if_long`, the core directly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Protocol

from tilework.comm import provenance_digest
from tilework.comm.contract import MessageWait, ProcessGroup
from tilework.comm.flight.ring import RUNNING, Entry
from tilework.comm.per_call.callsite import call_site
from tilework.comm.world import World, current_world
from tilework.optional_core import core as _core

#: Seconds after which a wait is long.
AFTER_SECONDS = 0.3

_functions: list[Callable[[], None]] = []


def add_function(function: Callable[[], None]) -> None:
    """Have threads that wait long call ``function``, which is quick, and may raise. Idempotent."""
    if function in _functions:
        return
    _functions.append(function)
    if _core is not None:
        _core.set_long_wait(_call, AFTER_SECONDS)


def _call() -> None:
    for function in _functions:
        function()


def look_if_long(begun: float) -> None:
    """Call the functions of :func:`add_function` if the wait since ``begun`` is long."""
    if time.monotonic() - begun > AFTER_SECONDS:
        _call()


class Looker(Protocol):
    """An object of each rank that looks at long waits. The class has no arguments."""

    def look(self, world: World) -> None:
        """Look at the calling thread's wait, perhaps report or end it. Quick: called often."""
        ...


def look_while_waiting(kind: type[Looker]) -> None:
    """Have threads that wait long call ``look`` of the rank's ``kind`` object. Idempotent."""
    add_function(_look_of(kind))


@cache
def _look_of(kind: type[Looker]) -> Callable[[], None]:
    def look() -> None:
        world = current_world()
        for each in (world, world.guests):
            if each is not None and each.default_group is not None:
                each.state(kind).look(each)

    return look


def open_groups(world: World) -> list[ProcessGroup]:
    """The groups that were not aborted: others may still name the wait that the abort ended."""
    return [group for group in world.records if group.why_aborted() is None]


def collective_wait(
    groups: Iterable[ProcessGroup],
) -> tuple[ProcessGroup, int, Sequence[int]] | None:
    """The collective that the calling thread waits in: group, number, awaited ranks; or None."""
    for group in groups:
        wait = group.waiting()
        if wait is not None:
            return group, *wait
    return None


def message_wait(groups: Iterable[ProcessGroup]) -> tuple[ProcessGroup, MessageWait] | None:
    """The message that the calling thread waits for, with the group; None if there is none."""
    for group in groups:
        wait = group.message_wait()
        if wait is not None:
            return group, wait
    return None


def operation_name(group: ProcessGroup, number: int, entry: Entry | None = None) -> str:
    """The title, place and group of the operation that this thread waits in (its ``entry``)."""
    if entry is None:
        running = [e for e in group.flight_entries() if e.outcome == RUNNING and e.peer is None]
        last = running[-1] if running else None
        entry = next((e for e in running if e.number == number), last)
    title = provenance_digest.named(entry.what if entry else f"operation #{number}")
    site = call_site() or (entry.site if entry else "")
    place = f" at {site}" if site else ""
    return f"{title}{place} (group {group.group_name!r})"
