"""Ranks that save or load together: the same errors on all ranks, and separate groups."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tilework.checkpoint.progress import Progress
from tilework.checkpoint.system_errors import as_checkpoint_error
from tilework.comm.contract import ProcessGroup
from tilework.comm.groups import new_group
from tilework.comm.operations.internal import agree
from tilework.comm.world import AnyGroup, NonMember, current_world, is_initialized, resolve
from tilework.errors import CheckpointError

T = TypeVar("T")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Ranks:
    """The ranks of a group (None: the default group); this process alone if there is no group."""

    def __init__(self, group: AnyGroup = None) -> None:
        resolved = resolve(group) if group is not None or is_initialized() else None
        if isinstance(resolved, NonMember):
            raise ValueError(
                f"this rank is not in {resolved!r}: call this on the ranks of the group only"
            )
        self.group: ProcessGroup | None = resolved

    @property
    def all(self) -> tuple[int, ...]:
        """The global ranks, ascending by group rank."""
        return (0,) if self.group is None else self.group.global_ranks

    @property
    def here(self) -> int:
        return 0 if self.group is None else self.group.global_ranks[self.group.rank()]

    @property
    def number(self) -> int:
        return 0 if self.group is None else self.group.rank()

    @property
    def is_first(self) -> bool:
        """True on the first rank of the group, which writes the index."""
        return self.here == self.all[0]

    def gather(self, make: Callable[[], T]) -> list[T]:
        """Call ``make()`` on each rank; return all results on all ranks, in order. Collective.

        If any call raises, an error is raised on every rank: a CheckpointError if it was one, or if
        the system refused a file or memory.
        """
        results = self._outcomes(make)
        failed = {
            rank: failure for rank, (_, failure) in zip(self.all, results, strict=True) if failure
        }
        if failed:
            message, file, tensor = next(iter(failed.values()))
            first = next(iter(failed))
            raise CheckpointError(
                f"rank {first}: {message}" if self.group is not None else message,
                file=file,
                tensor=tensor,
                ranks=list(failed),
            )
        return [value for value, _ in results]

    def _outcomes(self, make: Callable[[], T]) -> list[tuple[T, tuple[str, str, str] | None]]:
        def outcome() -> Any:
            try:
                return make(), None
            except Exception as error:
                told = as_checkpoint_error(error)
                if told is None:
                    raise
                return None, (str(told), told.file, told.tensor)

        return [outcome()] if self.group is None else agree(outcome, self.group)

    def progress(self, what: str, total: int, afterwards: str = "") -> Progress:
        """A bar on the first rank only, of that rank's bytes: all ranks have about as many."""
        others = "other ranks" if len(self.all) > 1 else ""
        awaited = " and ".join(filter(None, (afterwards, others)))
        return Progress(what, total, None if self.is_first else False, awaited)

    def same_host(self) -> Ranks:
        """Those of the ranks that run on this host. Collective at the first call for a group."""
        if self.group is None or self.group.size() == 1:
            return self
        return _own_groups().same_host(self)

    def own(self) -> Ranks:
        """The same ranks, in a group that nothing else uses. Collective at the first call."""
        return self if self.group is None else _own_groups().own(self)


def of_group(group: ProcessGroup | None) -> Ranks:
    """The ranks of a group, which need not be registered; None: this process alone."""
    ranks = object.__new__(Ranks)
    ranks.group = group
    return ranks


def host_name() -> str:
    """A text that is the same on all ranks of a host, and different on other hosts."""
    try:
        return f"{socket.gethostname()} {_BOOT_ID.read_text().strip()}"
    except OSError:
        return socket.gethostname()


@dataclass
class _OwnGroups:
    """The groups that checkpoints of one rank have made; closed with the rank's World."""

    #: Called before the groups are closed.
    before_close: list[Callable[[], None]] = field(default_factory=list)
    #: By group of a caller: the group of the same ranks that checkpoints use.
    own_groups: dict[ProcessGroup, ProcessGroup] = field(default_factory=dict)
    #: By group of a caller: the group of this host's ranks.
    host_groups: dict[ProcessGroup, ProcessGroup] = field(default_factory=dict)

    def own(self, ranks: Ranks) -> Ranks:
        assert ranks.group is not None
        known = self.own_groups.get(ranks.group)
        if known is None:
            self.drop_ended()
            known = self.own_groups[ranks.group] = _unregistered(ranks.all)
        return of_group(known)

    def same_host(self, ranks: Ranks) -> Ranks:
        group = ranks.group
        assert group is not None
        known = self.host_groups.get(group)
        if known is None:
            names = agree(host_name, group)
            mine = names[group.rank()]
            here = tuple(r for r, name in zip(ranks.all, names, strict=True) if name == mine)
            known = group if len(here) == group.size() else _unregistered(here)
            self.host_groups[group] = known
        return of_group(known)

    def drop_ended(self) -> None:
        registered = current_world().records
        ended = [group for group in self.own_groups if group not in registered]
        for group in ended:
            own = self.own_groups.pop(group)
            for host in (self.host_groups.pop(group, None), self.host_groups.pop(own, None), own):
                if host is not None and host not in registered:
                    host.close()

    def close(self) -> None:
        while self.before_close:
            self.before_close.pop()()
        groups = [*self.own_groups.values(), *self.host_groups.values()]
        self.own_groups, self.host_groups = {}, {}
        for group in groups:
            group.close()


def before_end(function: Callable[[], None]) -> None:
    """Arrange that a function is called as this rank ends, before the groups close. Local."""
    _own_groups().before_close.append(function)


def _own_groups() -> _OwnGroups:
    return current_world().state(_OwnGroups)


def _unregistered(ranks: tuple[int, ...]) -> ProcessGroup:
    """A new group of ``ranks``, which lives until the caller closes it. Collective."""
    group = new_group(ranks, use_local_synchronization=True, group_desc="checkpoints")
    assert isinstance(group, ProcessGroup)
    current_world().records.pop(group)
    return group
