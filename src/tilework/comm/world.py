"""All state of one rank: groups, stores and names.

A ContextVar holds the World, so that N ranks can be N threads of one process. An ordinary process
has one World, the variable's default, which all threads see.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, ClassVar, TypeVar, cast
from weakref import WeakSet

import torch

from tilework.comm.backend import Backend, BackendConfig
from tilework.comm.contract import ProcessGroup
from tilework.comm.flight import watch
from tilework.comm.flight.notes import Notes, Sink
from tilework.comm.making.rank_watch import RankWatch
from tilework.comm.per_call.callbacks import end_idle_threads, finish_callbacks
from tilework.comm.per_call.callsite import user_frame
from tilework.optional_core import core as _core
from tilework.rendezvous import detect_environment
from tilework.store import Store

StateT = TypeVar("StateT")


class NonMember:
    """Stands for a group on a rank outside the group; has the group's name and the members' ranks.

    All such objects equal ``GroupMember.NON_GROUP_MEMBER``. Operations on them warn once and do
    nothing.
    """

    def __init__(self, group_name: str = "", global_ranks: Sequence[int] = ()) -> None:
        self.group_name = group_name
        self.global_ranks = tuple(global_ranks)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NonMember)

    def __hash__(self) -> int:
        return hash(NonMember)

    def __repr__(self) -> str:
        return f"<group {self.group_name!r} of ranks {list(self.global_ranks)}, not this one>"


#: The type of ``group`` in operations; None is the default group.
AnyGroup = ProcessGroup | NonMember | None


class _GroupMeta(type):
    @property
    def WORLD(cls) -> ProcessGroup | None:
        """The default group; None before init_process_group."""
        return current_world().default_group


class GroupMember(metaclass=_GroupMeta):
    """``WORLD`` is the default group; ranks outside a group get ``NON_GROUP_MEMBER``."""

    NON_GROUP_MEMBER: ClassVar[NonMember] = NonMember()


class group(metaclass=_GroupMeta):
    """``group.WORLD`` is the default group."""


@dataclass(slots=True)
class GroupRecord:
    """A registered group, with the store, the backends and the timeout that it was made with."""

    group: ProcessGroup
    store: Store
    #: The backend of each device, after any fallback to another backend.
    config: BackendConfig
    #: The name of the backend for CPU tensors, or of the first backend if there is none.
    backend: str
    timeout: timedelta
    #: The backend's options, for the group that follows this one.
    options: Any = None


class _Slots:
    """The attribute of a World that the core reads directly from the object's memory."""

    __slots__ = ("default_group",)


@dataclass(eq=False)
class World(_Slots):
    """All state of one rank: the groups, the store, and the state that higher layers keep."""

    #: Made by a function, because a default value would clash with the slot.
    default_group: ProcessGroup | None = field(default_factory=lambda: None)
    #: The records of the registered groups, in the order of registration.
    records: dict[ProcessGroup, GroupRecord] = field(default_factory=dict)
    #: Numbers the groups that all ranks make together.
    group_count: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    #: By set of ranks: the number of groups that these ranks made by themselves.
    local_counts: dict[tuple[int, ...], int] = field(default_factory=dict)
    #: The operation and group name of each warning about a call from outside of a group.
    warned: set[tuple[str, str]] = field(default_factory=set)
    #: The store that rendezvous made, closed with the World.
    owned_store: Store | None = None
    #: Overrides LOCAL_RANK where ranks share one environment.
    local_rank: int | None = None
    #: The watch over the ranks that met at the store; None once ranks have new numbers.
    watch: RankWatch | None = None
    #: The notes of the flight record.
    notes: Notes = field(default_factory=Notes)
    #: Where events are written while the rank is traced; else None.
    sink: Sink | None = None
    #: The default generator of a rank in a shared process; None: torch's default generator.
    generator: torch.Generator | None = None
    #: The state that higher layers keep for this rank, by class.
    states: dict[type, Any] = field(default_factory=dict)
    #: The seat of each rank of the default group: the number that it was started with.
    seats: tuple[int, ...] = ()
    #: True if nobody chose the default group's backend: over several hosts it may be another.
    chooses_backend: bool = False
    #: True once there was a default group.
    has_met: bool = False
    #: Threads of other ranks in this process, as of the meeting of ranks.
    bystanders: WeakSet[threading.Thread] = field(default_factory=WeakSet)
    #: Registered groups that another World made and closes: the groups under torch's groups.
    borrowed: set[ProcessGroup] = field(default_factory=set)
    #: The groups under torch's groups, among which waits may be in a circle; the first is the
    #: default group.
    guests: World | None = None

    def host(self, record: GroupRecord) -> Callable[[], None]:
        """Add a group that another World made and will close to the ``guests``; return a function
        that removes it.
        """
        guests = self.guests = self.guests or World()
        guests.borrow(record)
        group = record.group
        guests.default_group = guests.default_group or group

        def leave() -> None:
            guests.forget(group)
            guests.default_group = next(iter(guests.records), None)

        return leave

    def borrow(self, record: GroupRecord) -> ProcessGroup:
        """Register a group that another World made and will close; return the group."""
        if record.group not in self.records:
            self.records[record.group] = record
            self.borrowed.add(record.group)
        return record.group

    def register(self, record: GroupRecord, name: str, ranks: Sequence[int], desc: str) -> None:
        """Register the group of ``record``: set the group's name, global ranks and description."""
        if not self.records:
            self.notes = Notes(threading.current_thread())
            if self is not _process_world:
                self.bystanders = WeakSet(threading.enumerate())
        group = record.group
        group.group_name, group.group_desc = name, desc
        group.global_ranks = tuple(ranks)
        group.group_ranks = {rank: number for number, rank in enumerate(ranks)}
        self.records[group] = record
        if self.sink is not None:
            self.sink.see(record)
        _live.add(self)
        watch.arm()

    def default(self) -> ProcessGroup:
        """The default group, or a ValueError."""
        if self.default_group is None:
            raise ValueError(
                "Default process group has not been initialized, please make sure to call "
                "init_process_group. Forked processes have no groups, nor have those that called "
                "destroy_process_group()."
            )
        return self.default_group

    def record(self, group: ProcessGroup) -> GroupRecord:
        """The record of ``group``; a ValueError if it was not made here, or was destroyed."""
        record = self.records.get(group)
        if record is None:
            raise ValueError(
                f"{group!r} is not registered: make groups with init_process_group or new_group, "
                f"and do not use them once destroyed"
            )
        return record

    def forget(self, group: ProcessGroup) -> None:
        """Unregister ``group``, and close it unless another World made it."""
        record = self.records.pop(group, None)
        if group in self.borrowed:
            self.borrowed.remove(group)
        elif record is not None:
            record.group.close()

    def succeed(self, group: ProcessGroup, seats: tuple[int, ...]) -> None:
        """Make ``group`` the default group, of ranks with new numbers; close all other groups.

        ``seats`` has the number that each rank was started with. Objects of :meth:`state` have to
        ``forget_groups()``.
        """
        for known in reversed(list(self.records)):
            if known is not group:
                self.forget(known)
        self._begin_with(group, seats)

    def _begin_with(self, group: ProcessGroup | None, seats: tuple[int, ...]) -> None:
        """Set the default group, with nothing left of the groups before."""
        for state in self.states.values():
            if hasattr(state, "forget_groups"):
                state.forget_groups()
        self.default_group, self.seats = group, seats
        self.group_count, self.local_counts = itertools.count(1), {}
        self.warned.clear()
        self.end_watch()

    def state(self, kind: type[StateT]) -> StateT:
        """The object of class ``kind`` that a higher layer keeps for this rank; made when needed.

        It outlives the groups, and is closed with the World if it has a method ``close``.
        """
        state = self.states.get(kind)
        if state is None:
            state = self.states.setdefault(kind, kind())
        return cast(StateT, state)

    def end(self) -> None:
        """Close the state of higher layers, then every group. Idempotent."""
        while self.states:
            _, state = self.states.popitem()
            if hasattr(state, "close"):
                state.close()
        guests, self.guests = self.guests, None
        if guests is not None:
            guests.borrowed.clear()  # else they would close after the wait for callbacks
            guests.end()
        self.close()

    def close(self) -> None:
        """Close every group, newest first, and the store. Idempotent.

        Raises:
            DistBackendError: A group's asynchronous operation failed, and no call has raised that.
        """
        with contextlib.ExitStack() as closing:
            closing.callback(self._end)
            for known in list(self.records):
                closing.callback(self.forget, known)

    def _end(self) -> None:
        self._begin_with(None, ())
        end_idle_threads()
        store, self.owned_store = self.owned_store, None
        if store is not None:
            store.close()

    def end_watch(self) -> None:
        """Stop watching whether the processes of the other ranks still run."""
        watch, self.watch = self.watch, None
        if watch is not None:
            watch.close()

    def abort(self, reason: str) -> None:
        """Make every operation on every group of this rank raise PeerLostError, on all ranks."""
        for known in list(self.records):
            known.abort(reason)


_process_world = World()
_world: ContextVar[World] = ContextVar("tilework_world", default=_process_world)
if _core is not None:
    _core.register_world(_world, World, ProcessGroup)


# The Worlds that ever had a group, which give the flight records of the process.
_live: WeakSet[World] = WeakSet()


def live_worlds() -> list[World]:
    """The Worlds in this process that have or had a group, in no order."""
    return list(_live)


def current_world() -> World:
    """The World of the calling rank."""
    return _world.get()


@contextmanager
def own_world(world: World) -> Iterator[World]:
    """Make ``world`` current in this thread (strictly: this context) within the block."""
    token = _world.set(world)
    try:
        yield world
    finally:
        _world.reset(token)


def _forget_in_child() -> None:
    """Reset the World in a forked child, which does not own the parent's groups."""
    _live.clear()
    world = current_world()
    # Never freed: Gloo's destructor waits for threads that only the parent has.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(world.records))
    world.__init__()  # type: ignore[misc]  # in place: this object is the ContextVar's default


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


def end_process() -> None:
    """Close the groups, and wait up to a minute for callbacks; also runs at exit. Idempotent."""
    _process_world.end()
    finish_callbacks()


atexit.register(end_process)


# -- questions about groups -----------------------------------------------------------------


def is_available() -> bool:
    """True if the package can make process groups here: always.

    Example:
        >>> is_available()
        True
    """
    return True


def is_initialized() -> bool:
    """True if this rank has a default group.

    Example:
        >>> is_initialized()
        False
    """
    return current_world().default_group is not None


def get_default_group() -> ProcessGroup:
    """The default group.

    Raises:
        ValueError: init_process_group was not called, or the group was destroyed.
    """
    return current_world().default()


def get_default_store() -> Store:
    """The default group's store.

    Raises:
        ValueError: There is no default group.
    """
    world = current_world()
    return world.record(world.default()).store


def resolve(group: AnyGroup) -> ProcessGroup | NonMember:
    """The tilework group that ``group`` means, or that runs torch's; None: the default group."""
    return current_world().default() if group is None else native_group(group)


def native_group(group: Any) -> ProcessGroup | NonMember:
    """The tilework group that ``group`` means, for torch's group the group that runs it. Local.

    Raises TypeError for anything else, such as torch's group on torch's own backend.
    """
    if isinstance(group, ProcessGroup | NonMember):
        return group
    record: GroupRecord | None = getattr(group, "tilework_record", None)
    if record is not None:
        return current_world().borrow(record)
    kind = type(group)
    if kind.__module__.startswith(("torch.distributed", "torch._C._distributed")):
        raise TypeError(
            f"{group!r} is a torch.distributed process group on one of torch's own backends: "
            f"tilework's functions take groups of tilework.distributed (new_group), and groups of "
            f'torch.distributed after torch.distributed.init_process_group("tilework")'
        )
    raise TypeError(
        f"group must be a process group, as new_group() returns, or None; got {group!r}"
    )


def member(group: AnyGroup, operation: str) -> ProcessGroup | None:
    """The tilework group that ``group`` means (None: the default group), if this rank is in it.

    On a rank outside the group: None, with a warning at the first call of ``operation``.
    """
    if group is None:
        default = _world.get().default_group
        return current_world().default() if default is None else default
    if isinstance(group, ProcessGroup):
        return group
    if isinstance(group, NonMember):
        _warn_outside(group, operation)
        return None
    return member(native_group(group), operation)


def _warn_outside(group: NonMember, operation: str) -> None:
    world = current_world()
    key = (operation, group.group_name)
    if key in world.warned:
        return
    world.warned.add(key)
    frame = user_frame(sys._getframe())
    file, line = ("tilework", 1) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    warnings.warn_explicit(
        f"Running {operation} on global rank {get_rank()} which does not belong to the given "
        f"group {group.group_name!r} of ranks {list(group.global_ranks)}: nothing is done. "
        f"Call it on member ranks only (rank_not_in_group(group) shows which).",
        UserWarning,
        file,
        line,
    )


def rank_not_in_group(group: AnyGroup) -> bool:
    """True if this rank is outside ``group`` (None: the default group, which has all ranks).

    Example: see :func:`new_group`.
    """
    return isinstance(group, NonMember)


def get_rank(group: AnyGroup = None) -> int:
    """This rank's number within ``group``; -1 outside it.

    Raises:
        ValueError: There is no default group, and ``group`` is None.

    Example:
        >>> import tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     pair = dist.new_group([1, 2])
        ...     return dist.get_rank(), dist.get_rank(pair), dist.get_world_size(pair)
        >>> run_ranks(3, program)
        [(0, -1, -1), (1, 0, 2), (2, 1, 2)]
    """
    resolved = resolve(group)
    return -1 if isinstance(resolved, NonMember) else resolved.rank()


def get_world_size(group: AnyGroup = None) -> int:
    """The number of ranks in ``group``; -1 outside it.

    Raises:
        ValueError: There is no default group, and ``group`` is None.

    Example:
        See :func:`get_rank`.
    """
    resolved = resolve(group)
    return -1 if isinstance(resolved, NonMember) else resolved.size()


def get_process_group_ranks(group: AnyGroup) -> list[int]:
    """The global ranks of ``group``, in the order of group ranks.

    Ranks outside the group may ask, too.
    """
    return list(_registered_ranks(resolve(group)))


def get_group_rank(group: AnyGroup, global_rank: int) -> int:
    """The group rank of ``global_rank`` in ``group``.

    Raises:
        ValueError: The rank is not part of the group, or the group is not registered.

    Example:
        >>> import tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     pair = dist.new_group([1, 2])
        ...     return dist.get_group_rank(pair, 2), dist.get_global_rank(pair, 0)
        >>> run_ranks(3, program)[0]
        (1, 1)
    """
    resolved = resolve(group)
    ranks = _registered_ranks(resolved)
    if global_rank not in ranks:
        raise ValueError(
            f"Global rank {global_rank} is not part of group {resolved.group_name!r} of ranks "
            f"{list(ranks)}"
        )
    return ranks.index(global_rank)


def get_global_rank(group: AnyGroup, group_rank: int) -> int:
    """The global rank of ``group_rank`` in ``group``.

    Raises:
        ValueError: There is no such member, or the group is not registered.

    Example:
        See :func:`get_group_rank`.
    """
    resolved = resolve(group)
    ranks = _registered_ranks(resolved)
    if not 0 <= group_rank < len(ranks):
        raise ValueError(
            f"Group rank {group_rank} is not part of group {resolved.group_name!r}, which has "
            f"{len(ranks)} ranks"
        )
    return ranks[group_rank]


def _registered_ranks(group: ProcessGroup | NonMember) -> tuple[int, ...]:
    if isinstance(group, NonMember):
        return group.global_ranks
    return current_world().record(group).group.global_ranks


def get_backend(group: AnyGroup = None) -> str:
    """The name of ``group``'s backend ("shm", …), or of the cpu backend if there are several.

    Raises:
        ValueError: This rank is not in the group, or the group is not registered.
    """
    return Backend(_own_record(group).backend)


def get_backend_config(group: AnyGroup = None) -> str:
    """The backend of each device in ``group``, like "cpu:shm,cuda:nccl".

    Raises:
        ValueError: This rank is not in the group, or the group is not registered.
    """
    return str(_own_record(group).config)


def _own_record(group: AnyGroup) -> GroupRecord:
    resolved = resolve(group)
    if isinstance(resolved, NonMember):
        raise ValueError(f"Invalid process group specified: this rank is not in {resolved!r}")
    return current_world().record(resolved)


def get_pg_count() -> int:
    """The number of groups that this rank has, including the default group."""
    return len(current_world().records)


def get_node_local_rank(fallback_rank: int | None = None) -> int:
    """This rank's number on the host: LOCAL_RANK, or the variable of mpirun or srun.

    Raises:
        RuntimeError: None of the variables is set, and there is no ``fallback_rank``.
        ValueError: LOCAL_RANK is not a number.
    """
    ours = current_world().local_rank
    if ours is not None:
        return ours
    text = os.environ.get("LOCAL_RANK")
    if text is not None:
        if not text.isdecimal():
            raise ValueError(f"LOCAL_RANK must be a number from 0 on, got {text!r}")
        return int(text)
    launched = detect_environment()
    if launched is not None and launched.local_rank is not None:
        return launched.local_rank
    if fallback_rank is not None:
        return int(fallback_rank)
    raise RuntimeError(
        "LOCAL_RANK is not in the environment: start the program with `tilework run` or "
        "torchrun, or pass fallback_rank"
    )
