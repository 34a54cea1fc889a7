"""Objects in a process that forks.

A forked child inherits locks that another thread may have held, and descriptors that it must
not share: a connection would carry two conversations, a server's sockets would hide the
server's death from its clients, and a file lock would be one for both processes.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class ForkAware(Protocol):
    """An object that repairs itself in a forked child, where only the forking thread runs on."""

    def after_fork_in_child(self) -> None:
        """Replace locks and drop inherited descriptors; must not block or raise."""


_watched: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def watch_forks(thing: ForkAware) -> None:
    """Call ``thing.after_fork_in_child()`` in every child forked while ``thing`` lives."""
    _watched.add(thing)


def _in_child() -> None:
    for thing in list(_watched):
        thing.after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
