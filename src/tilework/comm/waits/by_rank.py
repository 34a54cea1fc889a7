"""The waits of this rank's thread for others, as those see them who look at long waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Protocol

from tilework.comm.contract import MessageWait, ProcessGroup
from tilework.comm.waits import long_waits
from tilework.comm.world import World, current_world


class Looker(Protocol):
    """A rank's object that looks at its waits; made without arguments."""

    def look(self, world: World) -> None:
        """Look at what the calling thread waits in. Quick; called often."""
        ...


def look_while_waiting(kind: type[Looker]) -> None:
    """Have threads that wait long call ``look`` of their rank's ``kind``. Idempotent."""
    long_waits.add_function(_look_of(kind))


@cache
def _look_of(kind: type[Looker]) -> Callable[[], None]:
    def look() -> None:
        world = current_world()
        if world.default_group is not None:
            world.state(kind).look(world)

    return look


def collective_wait(
    groups: Iterable[ProcessGroup],
) -> tuple[ProcessGroup, int, Sequence[int]] | None:
    """The collective that the calling thread waits in: group, number, and the ranks to come."""
    for group in groups:
        wait = group.waiting()
        if wait is not None:
            return group, *wait
    return None


def message_wait(groups: Iterable[ProcessGroup]) -> tuple[ProcessGroup, MessageWait] | None:
    """The message that the calling thread waits for, and its group."""
    for group in groups:
        wait = group.message_wait()
        if wait is not None:
            return group, wait
    return None
