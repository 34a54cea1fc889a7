"""Events of operations for ``torch.profiler``: names, and the bytes that this rank moves.

An operation is an event ``tilework:all_reduce (8 bytes)``. An asynchronous operation is such an
event at the start, and an event ``tilework:wait all_reduce (8 bytes)`` during a wait. With
``record_shapes=True`` the event also has the tensors, and as arguments the bytes, the group and the
group's size. Without a profiler an operation only reads one flag.

:func:`listening` reports the same operations without a profiler.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.profiler import record_function

from tilework.comm.contract import ProcessGroup
from tilework.comm.per_call.call_recorder import is_hidden
from tilework.comm.world import World, current_world

_Fast: Any = getattr(getattr(torch._C, "_profiler", None), "_RecordFunctionFast", None)


#: The name of torch's flag, which older torch lacks.
_FLAG: Final = "_is_profiler_enabled"
_SETTER: Final = "_set_is_profiler_enabled"


#: What :func:`listening` has opened, for all ranks of this process.
_listeners: list[tuple[World, Callable[[str], None]]] = []
#: The functions of :func:`follow`.
_followers: list[Callable[[bool], None]] = []


def profiled() -> bool:
    """True while torch's profiler runs in this process, or somebody listens."""
    return bool(_listeners) or bool(getattr(profiler, _FLAG, False))


@contextmanager
def listening(tell: Callable[[str], None]) -> Iterator[None]:
    """Call ``tell`` with the kind of each collective that this rank starts within the block.

    Collectives by which ranks only compare or agree (:func:`.call_recorder.unrecorded`) are left
    out.
    """
    entry = (current_world(), tell)
    _change(lambda: _listeners.append(entry))
    try:
        yield
    finally:
        _change(lambda: _listeners.remove(entry))


def _change(listeners: Callable[[], None]) -> None:
    with _lock:
        listeners()
        for follower in _followers:
            follower(profiled())


def tell_listeners(kind: str) -> None:
    """Inform this rank's listeners of a collective that begins."""
    if _listeners and not is_hidden():
        world = current_world()
        for listener, tell in tuple(_listeners):
            if listener is world:
                tell(kind)


#: The program's name for operations that start now; "" for none.
_given_name: ContextVar[str] = ContextVar("tilework_comm_name", default="")
_lock = threading.Lock()


@contextmanager
def record_comm(name: str) -> Iterator[None]:
    """Name the operations within the block in ``torch.profiler``'s events.

    Args:
        name: Replaces the operation's name, as in ``tilework:name (8 bytes)``.

    Example:
        >>> import torch, tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     with torch.profiler.profile() as profile, dist.record_comm("gradients"):
        ...         dist.all_reduce(torch.ones(2))
        ...     return any(e.key == "tilework:gradients (8 bytes)" for e in profile.key_averages())
        >>> run_ranks(1, program)
        [True]
    """
    token = _given_name.set(name)
    try:
        yield
    finally:
        _given_name.reset(token)


def follow(tell: Callable[[bool], None]) -> None:
    """Call ``tell`` with True when a profiler or listener starts, with False when none is left."""
    _followers.append(tell)
    keep = getattr(profiler, _SETTER, None)
    if keep is None:
        return

    def set_flag(enabled: bool) -> None:
        keep(enabled)
        tell(profiled())

    setattr(profiler, _SETTER, set_flag)
    tell(profiled())


class ProfilerEvent:
    """A context manager for an operation's event, with the bytes that this rank reads or writes."""

    __slots__ = ("_facts", "_name", "_record", "_tensors")

    def __init__(self, name: str, tensors: Sequence[Tensor], group: ProcessGroup) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        name = _given_name.get() or name
        self._name = f"{name} ({nbytes:,} bytes)" if tensors else name
        self._facts = {"bytes": nbytes, "group": group.group_name, "ranks": group.size()}
        self._record: Any = None

    def of_waiting(self) -> AbstractContextManager[Any]:
        """A context manager for the event ``tilework:wait …``, during a wait for the operation."""
        return self._event(f"tilework:wait {self._name}", ())

    def __enter__(self) -> None:
        self._record = self._event(f"tilework:{self._name}", self._tensors)
        self._tensors = []
        self._record.__enter__()

    def __exit__(self, *error: object) -> None:
        record, self._record = self._record, None
        record.__exit__(*error)

    def _event(self, title: str, tensors: Sequence[Tensor]) -> AbstractContextManager[Any]:
        if _Fast is None:
            return record_function(title)
        made: AbstractContextManager[Any] = _Fast(title, list(tensors), self._facts)
        return made
