"""The shm backend's engine and group: tensors handed to the core (csrc/)."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from types import CodeType
from typing import Any, Final

import torch
from torch import Tensor

from tilework.comm import provenance_digest
from tilework.comm.backends.engine_protocol import Completion
from tilework.comm.backends.native import NativeGroup, label
from tilework.comm.backends.native_work import NativeWork, waiting_for
from tilework.comm.backends.shm.tensor_layout import tell_core
from tilework.comm.contract import CompletedWork, MessageWait, Work, shape_of
from tilework.comm.flight.ring import (
    ANY_PEER,
    Entry,
    FaultArgs,
    Ring,
    Tail,
    Timed,
    capacity_setting,
    describe,
    has_failed,
    outcome,
)
from tilework.comm.forms import MANY_INPUTS, MANY_OUTPUTS, Operation, Parts, op_factor, op_type
from tilework.comm.per_call import profiling
from tilework.comm.per_call.callsite import call_site, in_library
from tilework.comm.reduce_op import RedOpType
from tilework.optional_core import core as _core

#: The number of entries from which on a sweep looks for finished operations.
_FIRST_SWEEP = 64


@cache
def _dtypes() -> dict[torch.dtype | None, int]:
    """The core's numbers of dtypes; None: those that the core moves as bytes."""
    names = {name: code for name, code in _core.DTYPES.items() if name != "bytes"}
    return {None: _core.DTYPES["bytes"]} | {getattr(torch, n): code for n, code in names.items()}


class ShmEngine:
    """The engine of the backend ``shm``: hands the addresses of tensors to the core's group."""

    name = "shm"
    refusals: tuple[type[Exception], ...] = (ValueError, TypeError)
    takes_addresses = True
    watches = False

    def __init__(self, group: _core.Group, size: int) -> None:
        self.fault_type: type[Exception] = _core.Fault
        self.group = group
        self._owner = threading.get_ident()
        self._size = size
        self._kinds = _core.KINDS
        self._reduce_ops = _core.REDUCE_OPS
        self._dtypes, self._bytes = _dtypes(), _core.DTYPES["bytes"]
        #: Completions, with the buffers that the core may use until then; by the identity of the
        #: buffers.
        self._in_flight: dict[int, list[Any]] = {}
        #: The number of entries that triggers the next sweep.
        self._sweep_at = _FIRST_SWEEP
        self._lock = threading.Lock()
        # Bound once for speed: every operation calls these.
        self.sequence = group.sequence
        self.report_failure = group.report_failure
        self.failure_reports = group.failure_reports
        self.abort = group.abort
        self.aborted = group.aborted

    def run(self, operation: Operation) -> None:
        self.group.run(*self._arguments(operation))

    def submit(self, operation: Operation) -> Completion:
        return self._hand_over(operation, self.group.submit, *self._arguments(operation))

    def isend(
        self, tensor: Tensor, dst: int, tag: int, timeout: float, label: int = 0
    ) -> Completion:
        whole = self._whole(tensor)
        return self._hand_over(tensor, self.group.isend, dst, *whole, tag, timeout, label)

    def irecv(
        self, tensor: Tensor, src: int, tag: int, timeout: float, label: int = 0
    ) -> Completion:
        whole = self._whole(tensor)
        return self._hand_over(tensor, self.group.irecv, src, *whole, tag, timeout, label)

    def _whole(self, tensor: Tensor) -> tuple[int, int, int]:
        code = self._dtypes.get(tensor.dtype, self._bytes)
        return tensor.data_ptr(), tensor.nbytes, code

    def _hand_over(
        self, buffers: object, start: Callable[..., Completion], *args: Any
    ) -> Completion:
        """Start an operation; hold the buffers from before the start until it is done."""
        entry: list[Any] = [None, buffers]
        with self._lock:
            if len(self._in_flight) >= self._sweep_at:
                self._sweep()
            key = id(buffers)
            while key in self._in_flight:  # the same tensor, sent twice
                key += 1
            self._in_flight[key] = entry
        try:
            entry[0] = completion = start(*args)
        except (ValueError, self.fault_type):
            with self._lock:
                del self._in_flight[key]
            raise
        return completion

    def _sweep(self) -> None:
        """Release the buffers of all operations that are done. Runs when the number of entries has
        doubled, for a constant cost per entry.
        """
        kept = {k: e for k, e in self._in_flight.items() if e[0] is None or not e[0].done()}
        self._in_flight = kept
        self._sweep_at = max(_FIRST_SWEEP, 2 * len(kept))

    def let_go(self, buffers: object) -> None:
        """Release ``buffers`` of a finished operation."""
        with self._lock:
            entry = self._in_flight.get(id(buffers))
            done = entry is not None and entry[0] is not None and entry[0].done()
            if entry is not None and done and entry[1] is buffers:
                del self._in_flight[id(buffers)]

    def _arguments(self, operation: Operation) -> tuple[Any, ...]:
        op = operation.reduce_op
        return (
            self._kinds[operation.kind],
            self._dtypes.get(operation.dtype, self._bytes),
            self._reduce_ops[op_type(op)],
            operation.root,
            op_factor(op),
            self._spans(operation.inputs, operation.kind in MANY_INPUTS),
            self._spans(operation.outputs, operation.kind in MANY_OUTPUTS),
            operation.label,
            operation.timeout,
        )

    def _spans(self, parts: Parts, many: bool) -> list[tuple[int, int]]:
        if not isinstance(parts, Tensor):
            return [(part.data_ptr(), part.nbytes) for part in parts]
        address, nbytes = parts.data_ptr(), parts.nbytes
        if not many:
            return [(address, nbytes)]
        share = nbytes // self._size
        return [(address + r * share, share) for r in range(self._size)]

    def gather_bytes(self, own: bytes, timeout: float) -> bytes:
        """The bytes of all ranks, which have the same length, in order. Collective; blocks."""
        count = len(own)
        memory = ctypes.create_string_buffer(own, count * (1 + self._size))
        at = ctypes.addressof(memory)
        outputs = [(at + count * (1 + rank), count) for rank in range(self._size)]
        self._run_bytes("all_gather", [(at, count)], outputs, timeout)
        return memory.raw[count:]

    def spread_bytes(self, everyone: bytearray, timeout: float) -> None:
        """Copy the bytes of rank 0 to all ranks. Collective; blocks."""
        memory = (ctypes.c_char * len(everyone)).from_buffer(everyone)
        span = [(ctypes.addressof(memory), len(everyone))]
        self._run_bytes("broadcast", [], span, timeout)

    def _run_bytes(
        self,
        kind: str,
        inputs: list[tuple[int, int]],
        outputs: list[tuple[int, int]],
        timeout: float,
    ) -> None:
        none = self._reduce_ops["none"]
        self.group.run(*(self._kinds[kind], self._bytes, none, 0, 1.0, inputs, outputs, 0, timeout))

    def last_entered(self) -> list[str]:
        return [
            f"#{header[0]} {header[1]}" if header[0] else "nothing yet"
            for header in self.group.headers()
        ]

    def departed(self) -> Sequence[int]:
        try:
            return self.group.lost_ranks()
        except self.fault_type:  # this rank closed the group
            return ()

    def blocked(self) -> Sequence[tuple[int, int, str]]:
        try:
            waits = self.group.blocked_ranks()
            entered = self.last_entered() if waits else []
        except self.fault_type:  # this rank closed the group
            return ()
        return [(rank, number, f"operation {entered[rank]}") for rank, number in waits]

    def sees_messages(self) -> bool:
        return True

    def is_owner(self) -> bool:
        return threading.get_ident() == self._owner

    def waiting(self) -> tuple[int, Sequence[int]] | None:
        if not self.is_owner():
            return None
        try:
            number = self.group.last_wait()
            entered = [header[0] for header in self.group.headers()] if number else []
        except self.fault_type:  # this rank closed the group
            return None
        missing = [rank for rank, last in enumerate(entered) if last < number]
        return (number, missing) if missing else None

    def close(self) -> None:
        self.group.close()
        self._in_flight = {}

    def statistics(self) -> dict[str, int]:
        return self.group.statistics()


def place_of(site: tuple[CodeType, int] | None) -> str:
    """``file:line in function`` of a code object and a line; "" for None."""
    return "" if site is None else f"{site[0].co_filename}:{site[1]} in {site[0].co_name}"


class CoreRing(Ring):
    """The flight record (of recent operations) of a shm group. The core keeps it, because the fast
    path writes it, too. ``ranks`` gives the global rank of each group rank.
    """

    __slots__ = ("_ranks", "begin", "end", "follow", "ring")

    def __init__(self, ranks: Callable[[], Sequence[int]]) -> None:
        self.ring = _core.FlightRing(capacity_setting())
        self._ranks = ranks
        # The core's own methods, for speed: every operation calls these.
        self.begin = self.ring.begin  # type: ignore[method-assign]
        self.end = self.ring.end  # type: ignore[method-assign]
        self.follow = self.ring.follow  # type: ignore[method-assign]

    def entries(self) -> list[Entry]:
        return [self._entry(record) for record in self.ring.records()]

    def first_failed(self, fault: FaultArgs) -> Entry | None:
        for record in self.ring.records():
            *_, ended, _, pending, peer, _ = record
            if not ended and peer is None and has_failed(pending, fault):
                return self._entry(record)
        return None

    def _entry(self, record: _core.Record) -> Entry:
        number, what, site, entered, ended, failure, pending, peer, tag = record
        if peer is not None and not isinstance(what, str):  # the core knows group ranks only
            what = describe(what) + _of_message(what[0], peer, tag, self._ranks())
            peer = self.global_peer(peer)
        text = outcome(ended / 1e9 if ended else None, failure if ended else pending)
        times = entered / 1e9, ended / 1e9 or None
        return Entry(number, describe(what), place_of(site), *times, text, peer, tag)

    def global_peer(self, peer: int) -> int:
        """The global rank of the other end of a message of the fast path, or ANY_PEER."""
        return ANY_PEER if peer < 0 else self._ranks()[peer]

    def tail(self) -> Tail:
        self.ring.grow(_TRACED_CAPACITY)
        return _CoreTail(self)

    def cut(self) -> None:
        """Nothing is kept for the reader of a tail."""


#: The operations that a ring keeps while it is traced: those of some milliseconds, at the least.
_TRACED_CAPACITY: Final = 8192


class _CoreTail:
    """The tail of a :class:`CoreRing`: asks the core for the operations since the last read."""

    def __init__(self, ring: CoreRing) -> None:
        self.lost = 0
        self._ring = ring
        self._next = ring.ring.since(_core.NEVER_BYTES, ())[0]
        #: The slots of operations without an end; True: done, but nobody has noticed.
        self._running: dict[int, bool] = {}

    def read(self) -> list[Timed]:
        known = self._running
        end, ahead, records = self._ring.ring.since(self._next, [*known])
        self.lost += end - self._next - sum(each[0] >= self._next for each in records)
        self._next = end
        self._running = {
            slot: finished > 0 for slot, record, _, finished in records if not record[4]
        }
        return [
            self._timed(*each, ahead)
            for each in records
            if each[0] not in known or known[each[0]] != self._running.get(each[0])
        ]

    def _timed(
        self, slot: int, record: _core.Record, waited: int, finished: int, ahead: int
    ) -> Timed:
        number, what, site, entered, ended, failure, pending, peer, tag = record
        if peer is not None and not isinstance(what, str):
            peer = self._ring.global_peer(peer)
        told = outcome(ended or None, failure if ended else pending)
        entered, waited, finished, ended = (
            moment - ahead if moment else 0 for moment in (entered, waited, finished, ended)
        )
        place = place_of(site)
        return Timed(slot, number, what, place, peer, tag, entered, waited, finished, ended, told)


class ShmGroup(NativeGroup):
    """A process group of the backend ``shm``. Calls with plain tensors take the core's fast path,
    which skips most of the Python code.
    """

    engine: ShmEngine
    flight: CoreRing

    def __init__(self, engine: ShmEngine, rank: int, size: int, timeout: timedelta) -> None:
        this = weakref.ref(self)  # the core's objects must not keep the group alive

        def ranks() -> Sequence[int]:
            group = this()
            return () if group is None else group.global_ranks

        super().__init__(engine, rank, size, timeout, CoreRing(ranks))
        self._make_fast_path()

    def _make_fast_path(self) -> None:
        if not _sees_tensors:
            return
        this = weakref.ref(self)

        def fail(*args: Any) -> None:
            group = this()
            if group is not None:
                group._fast_path_failed(*args)

        def make_work(call: _core.PostedCall | None, *args: Any) -> Work:
            group = this()
            assert group is not None  # a method of the group is running
            if call is not None:
                return PostedWork(group, call, *args)
            outputs, peer = args[2], args[4]  # of a message
            if outputs is None:
                return CompletedWork()
            return CompletedWork([outputs], group.global_ranks[peer])

        fast_path = _core.FastPath(
            *(self.engine.group, self.flight.ring, self.timeout, fail, make_work)
        )
        self.fast_path = fast_path
        self.takes_rows = True

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        self._make_fast_path()  # a fast path keeps the timeout that it was made with

    def close(self) -> None:
        if self.registers is not None:
            self.registers.leave(self._rank)
        super().close()

    def empty(self, *size: int | Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        shape = shape_of(size)
        dtype = dtype or torch.get_default_dtype()
        if min(shape, default=1) < 0 or shape.numel() == 0:
            return super().empty(*shape, dtype=dtype)
        nbytes = shape.numel() * dtype.itemsize
        try:
            arena = self.engine.group.arena()
        except self.engine.fault_type as fault:
            raise self.explain(fault.args, "empty", call_site()) from None
        address = arena.allocate(nbytes)
        if address == 0:
            return super().empty(*shape, dtype=dtype)
        memory = (ctypes.c_char * nbytes).from_address(address)
        weakref.finalize(memory, arena.release, address).atexit = False
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    def _fast_path_failed(  # noqa: PLR0913
        self, why: Any, slot: int, name: str, inputs: Any, outputs: Any, reduce_op: Any, root: int
    ) -> None:
        """Raise the error for a failed operation of the fast path. ``why`` is the core's fault, or
        an exception that interrupted the operation, which is only recorded.
        """
        title = _title(name, inputs, outputs, reduce_op, root, self.global_ranks)
        title = provenance_digest.named(title)
        if isinstance(why, BaseException):
            self.note_interruption(slot, why, title)
            return
        error = self.explain(why, title, call_site())
        self.note_failure(slot, error)
        raise error from None


class PostedWork(NativeWork):
    """The Work of an asynchronous operation that the fast path has started."""

    _begun = 0.0

    def __init__(  # noqa: PLR0913
        self,
        group: ShmGroup,
        call: _core.PostedCall,
        name: str,
        inputs: Any,
        outputs: Any,
        reduce_op: Any,
        root: int,
    ) -> None:
        super().__init__(group, call.slot)
        self._call = call
        self._completion = call.completion
        self._operation = name, inputs, outputs, reduce_op, root
        self._is_message = name in _MESSAGES
        self._purpose = "" if self._is_message else provenance_digest.named("")

    def title(self) -> str:
        text = describe(self._call.what())
        if self._is_message:
            *_, tag, peer = self._operation
            text += _of_message(text, peer, tag, self.group.global_ranks)
        return text + self._purpose

    def site(self) -> str:
        return place_of(self._call.site())

    def outputs(self) -> list[Tensor]:
        outputs = self._operation[2]
        return [] if outputs is None else [outputs] if isinstance(outputs, Tensor) else outputs

    def message_wait(self) -> MessageWait:
        return MessageWait(self._operation[4], self.title(), self.site(), self._begun)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._call.finish(False):
            return True
        if not self._is_message:
            return self._wait(timeout)
        self._begun = time.monotonic()
        with waiting_for(self):
            return self._wait(timeout)

    def _wait(self, timeout: timedelta | None) -> bool:
        if timeout is not None:
            return super().wait(timeout)
        try:
            if self._call.finish(True):
                return True
        except self.group.engine.fault_type:
            return super().wait()
        except BaseException as interruption:
            self.group.note_interruption(self._slot, interruption, self.title())
            raise
        return super().wait()

    def settle(self) -> None:
        self._call.finish(False)

    def let_go(self) -> None:
        self._call.let_go()


#: The fast path's names of messages.
_MESSAGES = ("send", "recv")


def _title(
    name: str, inputs: Any, outputs: Any, reduce_op: Any, root: int, ranks: tuple[int, ...]
) -> str:
    """The operation as the program called it."""
    if name in _MESSAGES:
        tensor = inputs if name == "send" else outputs
        return f"{name} {label(tensor)}" + _of_message(name, root, reduce_op, ranks)
    return Operation.called(name, inputs, outputs, reduce_op, root).describe()


def _of_message(name: str, peer: int, tag: int, ranks: Sequence[int]) -> str:
    """The end of a message's title: the rank at the other end, and the tag. ``name`` begins with
    "send" or "recv".
    """
    direction = "to" if name.startswith("send") else "from"
    return f" {direction} {'any rank' if peer < 0 else f'rank {ranks[peer]}'} tag {tag}"


if _core is not None:
    profiling.follow(_core.set_profiled)

_sees_tensors = _core is not None and _core.register_torch(
    Tensor,
    torch.nn.Parameter,
    # The private function is faster than the public function; older torch has only the latter.
    getattr(torch._C, "_increment_version", torch.autograd.graph.increment_version),
    {member: member.value for member in RedOpType},
    in_library,
)
if _sees_tensors:
    tell_core()
