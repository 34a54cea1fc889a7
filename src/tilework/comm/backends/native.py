"""A process group on an engine: lowers the contract to operations, and explains failures.

Each native backend is this class over an engine. Lowering makes every tensor contiguous plain
data: non-contiguous outputs get a stand-in that is copied back, conjugate and negative views are
resolved, and kinds that only move data see complex numbers as pairs of reals (so complex64 fits
float32).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
from torch import Tensor

from tilework.comm import provenance_digest
from tilework.comm.backends.engine_protocol import Engine, FaultArgs
from tilework.comm.backends.native_work import Effects, EngineWork, MessageWork, awaited_message
from tilework.comm.backends.operation_header import (
    call_label,
    message_label,
    same_shapes,
    shape_label,
)
from tilework.comm.backends.shm.memory_hold import at_held_address, hold_memory, hold_operation
from tilework.comm.backends.tensor_memory import check_overlaps, plain, rows, stand_in
from tilework.comm.contract import CompletedWork, MessageWait, ProcessGroup, Work, seconds_of
from tilework.comm.flight.dump import note_fault
from tilework.comm.flight.history import named
from tilework.comm.flight.ring import ANY_PEER, RUNNING, Entry, Ring, Slot, Tail
from tilework.comm.forms import SCANS, Form, Operation, Parts, op_type
from tilework.comm.per_call import profiling
from tilework.comm.per_call.callsite import call_site
from tilework.comm.reduce_op import RedOpType, identity_element
from tilework.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistBackendError,
    PeerLostError,
)

#: By words in a text of the core: the difference of calls that the core has only numbers of.
_DIFFERENCES = {
    " of tensors of provenance ": "how their tensors came about",
    " with shapes of label ": "dtype or shape as given",
}
#: Seconds that a failing rank waits for the other ranks' reports.
_REPORT_SECONDS = 0.3
#: A call as ranks report it: number, operation, purpose, place.
_CALL = re.compile(r"(#\d+ )?(.*?)( for .*?)?( at \S+:\d+ in .*)?")
#: The most different calls in the first line of a mismatch.
_MAX_CALLS_IN_LINE = 3
_ADVICE_ON_LEAVING = (
    "All ranks of a group have to make the same calls: look for a branch (rank == 0) around this "
    "call, or a loop that ends earlier on the other rank."
)
_ERROR_OF: dict[str, type[DistBackendError]] = {
    "mismatch": CollectiveMismatchError,
    "peer_lost": PeerLostError,
    "timeout": CollectiveTimeoutError,
    "closed": DistBackendError,
}


class NativeGroup(ProcessGroup):
    """A process group that runs every operation on an :class:`Engine`."""

    #: The types of devices whose tensors the engine takes.
    devices: tuple[str, ...] = ("cpu",)
    #: False if the engine itself keeps memory until the data has moved.
    holds_memory = True

    def __init__(
        self, engine: Engine, rank: int, size: int, timeout: timedelta, flight: Ring | None = None
    ) -> None:
        super().__init__(rank, size)
        self.engine = engine
        self.timeout = seconds_of(timeout)
        self.flight = flight or Ring()
        self.unseen_error: DistBackendError | None = None
        self.failure_seen = False
        self._process = os.getpid()

    def getBackendName(self) -> str:
        return self.engine.name

    # -- operations ----------------------------------------------------------------------

    def start(self, operation: Operation) -> Work:
        form, at_root = operation.form, self._rank == operation.root
        inputs, outputs = operation.inputs, operation.outputs
        if form.root and not at_root:
            inputs, outputs = form.beside_root(operation)
        if form.kind in SCANS and op_type(operation.reduce_op) == "avg":
            raise ValueError(f"{form.name} has no AVG: use SUM, and divide by the number of ranks")
        operation.label = _label(form, operation, inputs, outputs)
        as_real = not form.reduces
        sources, targets = _as_list(inputs), _as_list(outputs)
        operation.inputs = [plain(tensor, as_real) for tensor in sources]
        if form.kind == "broadcast" and at_root:
            operation.outputs = [plain(tensor) for tensor in targets]
        elif form.kind == "exscan" and at_root:
            operation.outputs = _nothing_reduced(operation, targets[0].detach())
        else:
            operation.outputs = [stand_in(tensor, operation, as_real) for tensor in targets]
        if form.inputs.parts == "whole":
            operation.inputs = rows(operation.inputs[0], operation.in_rows)
        if form.outputs.parts == "whole":
            operation.outputs = rows(operation.outputs[0], operation.out_rows)
        return self._start(operation, targets)

    def monitored_barrier(self, timeout: timedelta | None = None) -> None:
        self._start(Operation("barrier", title="monitored_barrier", limit=timeout), [])

    # -- point to point ------------------------------------------------------------------

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Work:
        (tensor,) = tensors
        source, sent = plain(tensor), message_label(tensor)
        self._check_devices(source)
        title = f"send {label(source)} to rank {self.global_ranks[dst]} tag {tag}"
        slot = self.flight.begin(title, self.global_ranks[dst], tag, 2)
        hold = hold_memory([source], []) if self.holds_memory else None
        if hold is not None and not self.engine.takes_addresses:
            source = at_held_address(source)
        call = MessageWork(self, title, Effects([], [], []), source, slot, hold)
        call.peer = dst
        event = profiling.ProfilerEvent("send", [source], self) if profiling.profiled() else None
        return call.start(lambda: self.engine.isend(source, dst, tag, self.timeout, sent), event)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Work:
        (tensor,) = tensors
        operation = Operation("broadcast")
        target, expected = stand_in(tensor, operation), message_label(tensor)
        self._check_devices(target)
        whom = "any rank" if src < 0 else f"rank {self.global_ranks[src]}"
        title = f"recv {label(target)} from {whom} tag {tag}"
        effects = Effects([tensor], [tensor], operation.copy_back)
        peer = ANY_PEER if src < 0 else self.global_ranks[src]
        slot = self.flight.begin(title, peer, tag, 2)
        hold = hold_memory([target, tensor], [target]) if self.holds_memory else None
        if hold is not None and not self.engine.takes_addresses:
            target = at_held_address(target)
        call = MessageWork(self, title, effects, target, slot, hold)
        call.peer = src
        event = profiling.ProfilerEvent("recv", [target], self) if profiling.profiled() else None
        return call.start(
            lambda: self.engine.irecv(target, src, tag, self.timeout, expected), event
        )

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        return self.recv(tensors, -1, tag)

    # -- running -------------------------------------------------------------------------

    def _noted(self, fault: Exception, operation: Operation, slot: int) -> Exception:
        title = provenance_digest.named(operation.describe())
        error = self.explain(fault.args, title, call_site())
        self.failure_seen = True
        self.note_failure(slot, error)
        return error

    def _start(self, operation: Operation, outputs: list[Tensor]) -> Work:
        """Run or submit ``operation``; ``outputs`` are the user's tensors that it fills."""
        self._check_devices(operation.inputs)
        self._check_devices(operation.outputs)
        check_overlaps(operation, self._rank, self._size)
        operation.provenance = provenance_digest.digest()
        limit = operation.limit
        operation.timeout = self.timeout if limit is None else seconds_of(limit)
        only_read = operation.kind == "broadcast" and operation.root == self._rank
        effects = Effects(outputs, [] if only_read else outputs, operation.copy_back)
        slot = self.flight.begin(operation.summary(), None, 0, 3)
        event = self._event(operation) if profiling.profiled() else None
        if operation.is_async:
            title = provenance_digest.named(operation.describe())
            hold = None
            if self.holds_memory:
                hold = hold_operation(operation, only_read, self.engine.takes_addresses)
            call = EngineWork(self, title, effects, operation, slot, hold)
            return call.start(lambda: self.engine.submit(operation), event)
        try:
            if event is None:
                self.engine.run(operation)
            else:
                with event:
                    self.engine.run(operation)
        except self.engine.fault_type as fault:
            # A name for the error here would be a cycle, which keeps the engine's objects.
            raise self._noted(fault, operation, slot) from None
        except self.engine.refusals as error:
            self.flight.end(slot, f"{type(error).__name__}: {error}")
            raise
        except BaseException as interruption:
            self.note_interruption(slot, interruption, operation.describe())
            raise
        self.flight.end(slot)
        effects.settle()
        return CompletedWork(outputs)

    def _event(self, operation: Operation) -> profiling.ProfilerEvent:
        """The profiler's event of an operation, which listeners hear of."""
        profiling.tell_listeners(operation.kind)
        sides = operation.inputs, operation.outputs
        given, taken = ([side] if isinstance(side, Tensor) else list(side) for side in sides)
        return profiling.ProfilerEvent(operation.title or operation.kind, given or taken, self)

    def _check_devices(self, parts: Parts) -> None:
        for tensor in (parts,) if isinstance(parts, Tensor) else parts:
            if tensor.device.type not in self.devices:
                raise ValueError(
                    f"backend {self.name()!r} moves {' and '.join(self.devices)} tensors, got one "
                    f"on {tensor.device}; make the group with a backend for each device type, "
                    f"like backend='cpu:shm,cuda:nccl'"
                )

    def flight_entries(self) -> list[Entry]:
        return self.flight.entries()

    def flight_tails(self) -> list[Tail]:
        return [self.flight.tail()]

    def cut_tails(self) -> None:
        self.flight.cut()

    # -- failing -------------------------------------------------------------------------

    def explain(self, fault: FaultArgs, title: str, site: str) -> DistBackendError:
        """Turn a fault of the engine into the error to raise on this rank. Unless the group is
        aborted or closed already, also abort it. An asynchronous call that failed before is named
        in place of the call that notices, which ``title`` and ``site`` are of.
        """
        kind, at_fault, detail = fault
        number = self.engine.sequence()
        failed = None if kind in ("aborted", "closed") else self.flight.first_failed(fault)
        if failed is not None:
            number = failed.number
            if not (site == failed.site and title.startswith(failed.what)):
                title, site = failed.what, failed.site
        here = f"{title} at {site}" if site else title
        ranks = [self.global_ranks[r] for r in at_fault if 0 <= r < self._size]
        me = f"rank {self.global_ranks[self._rank]}"
        place = f"{me}, group {self.group_name!r}, operation #{number}"
        if kind == "closed":
            why = "the group was closed on this rank"
            if os.getpid() != self._process:
                why = (
                    "this process was forked from the rank, and no group outlives a fork: "
                    "communicate in the rank's own process, or start others (spawn)"
                )
            return DistBackendError(f"{why}: {here} ({place})")
        try:
            if kind == "aborted":
                return self._aborted_error(place, here, detail)
            self.engine.report_failure(f"#{number} {here}")
            if kind == "mismatch" and " sent " in detail:  # a message, of two ranks alone
                text = f"{detail}: {here} ({place}).\nReceive each message as it was sent."
            elif kind == "mismatch":
                text = self._mismatch_text(place, _in_words(detail))
            else:
                text = self._failure_text(kind, ranks, f"{here} ({place})", detail)
            self.engine.abort(kind, _with_ranks(ranks, text))
        except self.engine.fault_type:
            # This rank closed the group: other ranks can no longer be asked or informed.
            text = f"{detail}: {here} ({place})"
        return _ERROR_OF.get(kind, DistBackendError)(text, ranks=ranks)

    def note_failure(self, slot: Slot, error: DistBackendError) -> None:
        """Enter a failure into the flight record, and write that to a file if asked."""
        self.flight.end(slot, f"{type(error).__name__}: {error}")
        note_fault(error)

    def note_interruption(self, slot: Slot, error: BaseException, title: str) -> None:
        """Enter an interruption into the flight record, and abort: others cannot finish."""
        self.flight.end(slot, f"{type(error).__name__}: the caller was interrupted")
        self.abort(f"{type(error).__name__} in {title}")

    def _failure_text(self, kind: str, ranks: list[int], here: str, detail: str) -> str:
        whom = named(ranks) if ranks else "a rank"
        has_died = kind == "peer_lost" and "left the group" not in detail
        advice = provenance_digest.advice(here, has_died).replace(" ", "\n", 1)
        if kind == "peer_lost":
            why = detail.removeprefix(f"{whom} ") or "its process ended"
            if not (advice or has_died):
                advice = f"\n{_ADVICE_ON_LEAVING}"
            return f"lost {whom} ({why}): {here}.{advice}"
        last = self.engine.last_entered()
        entered = "; ".join(
            f"rank {rank} was last in: {last[self.global_ranks.index(rank)]}" for rank in ranks
        )
        who = entered or (
            "No rank is missing: perhaps ranks call different operations, or with tensors of "
            "different sizes"
        )
        return f"{detail}: {_waited(detail)}: {here}.\n{who}.{advice}"

    def _mismatch_text(self, place: str, detail: str) -> str:
        """The different calls, and where which ranks made them. Asks the other ranks."""
        reports = self.engine.failure_reports(_REPORT_SECONDS)
        last = self.engine.last_entered()
        ranks: dict[str, list[int]] = {}
        for rank, report, entered in zip(self.global_ranks, reports, last, strict=True):
            ranks.setdefault(report or entered or "nothing yet", []).append(rank)
        first, places, differ = _calls_text({call: named(who) for call, who in ranks.items()})
        if detail and not differ:
            first = f"{detail}: {first}"
        elif detail and " called " not in detail:
            place = f"{place}; {detail}"
        return (
            f"{first}\nranks called different things ({place}){places}.\n"
            f"Make every rank of the group call the same operations in the same order, "
            f"with matching arguments.{provenance_digest.advice(' '.join(ranks))}"
        )

    def _aborted_error(self, place: str, here: str, detail: str) -> DistBackendError:
        aborted = self.engine.aborted()
        if aborted is None:
            return DistBackendError(f"the group was aborted: {detail}: {here} ({place})")
        by, kind, text = aborted
        error = _ERROR_OF.get(kind, DistBackendError)
        ranks, text = _without_ranks(text)
        whom = f"rank {self.global_ranks[by]}" if 0 <= by < self._size else "one of its ranks"
        return error(f"the group was aborted by {whom}: {here} ({place}): {text}", ranks=ranks)

    # -- its life ------------------------------------------------------------------------

    def get_sequence_number_for_group(self) -> int:
        return self.engine.sequence()

    def statistics(self) -> dict[str, int]:
        return self.engine.statistics()

    def departed(self) -> Sequence[int]:
        return self.engine.departed()

    def blocked(self) -> Sequence[tuple[int, int, str]]:
        return self.engine.blocked()

    def last_entered(self) -> Sequence[str]:
        try:
            return self.engine.last_entered()
        except self.engine.fault_type:  # this rank closed the group
            return ()

    def waiting(self) -> tuple[int, Sequence[int]] | None:
        return self.engine.waiting()

    def messages_under_way(self) -> Sequence[Entry] | None:
        if not (self.engine.is_owner() and self.engine.sees_messages()):
            return None
        entries = self.flight_entries()
        return [e for e in entries if e.peer is not None and e.outcome == RUNNING]

    def message_wait(self) -> MessageWait | None:
        message = awaited_message()
        if message is not None:
            return message.message_wait() if message.group is self else None
        if not self.engine.is_owner():
            return None
        # The core records a blocking message, at the caller's request, as the last entry.
        entry = next(
            (e for e in reversed(self.flight_entries()) if e.peer is not None and not e.ended), None
        )
        if entry is None or entry.outcome != RUNNING:
            return None
        peer = -1 if entry.peer == ANY_PEER else self.global_ranks.index(entry.peer)
        return MessageWait(peer, entry.what, entry.site, entry.entered)

    def why_aborted(self) -> DistBackendError | None:
        try:
            if self.engine.aborted() is None:
                return None
        except self.engine.fault_type:  # closed on this rank
            return None
        place = f"rank {self.global_ranks[self._rank]}, group {self.group_name!r}"
        return self._aborted_error(place, "waiting for other ranks", "")

    def abort_for(self, kind: str, ranks: Sequence[int], text: str) -> None:
        with suppress(self.engine.fault_type):  # closed on this rank: no operation waits in it
            self.engine.abort(kind, _with_ranks(ranks, text))

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = seconds_of(timeout)

    def abort(self, reason: str = "abort() was called") -> None:
        # For the others this rank counts as lost.
        me = self.global_ranks[self._rank]
        self.engine.abort("peer_lost", _with_ranks([me], reason))
        note_fault(f"aborted group {self.group_name!r}: {reason}")

    def close(self) -> None:
        self.engine.close()


def _as_list(parts: Parts) -> list[Tensor]:
    return list(parts) if isinstance(parts, (list, tuple)) else [parts]  # in this order for speed


def _nothing_reduced(operation: Operation, target: Tensor) -> list[Tensor]:
    """The result of a reduction of nothing, which is copied to ``target`` after the operation."""
    op = RedOpType(op_type(operation.reduce_op).removeprefix("premul_"))
    value = identity_element(op, target.dtype)
    number = torch.tensor(value, dtype=target.dtype, device=target.device)
    result = number.expand(target.shape).contiguous()
    operation.copy_back.append((target, result))
    return [result]


def _label(form: Form, operation: Operation, inputs: Parts, outputs: Parts) -> int:
    """The label of the caller's tensors: of the side whose shape all ranks share."""
    shared, others = (outputs, inputs) if form.shares_output else (inputs, outputs)
    if isinstance(shared, (list, tuple)):  # a list on each side, or a barrier
        return shape_label((), shared[0].dtype) if shared else 0
    even = not (operation.in_rows or operation.out_rows)
    if isinstance(others, (list, tuple)):
        even = same_shapes(others, shared)
    return call_label(form.kind, shared, even)


def _calls_text(calls: Mapping[str, str]) -> tuple[str, str, bool]:
    """The calls of ranks; their numbers and places; True if the first text differs."""
    parts = {
        who: found.groups("") if (found := _CALL.fullmatch(call)) else ("", call, "", "")
        for call, who in calls.items()
    }
    alike = len({operation for _, operation, _, _ in parts.values()}) == 1
    briefly = {
        who: f"{operation}{purpose if alike else ''}"
        for who, (_, operation, purpose, _) in parts.items()
    }
    texts = [f"{who} {call}" for who, call in briefly.items()]
    more = ["…"] if len(texts) > _MAX_CALLS_IN_LINE else []
    first = ", ".join([*texts[:_MAX_CALLS_IN_LINE], *more])
    who = next(iter(parts))
    first = f"{who} called{first.removeprefix(who)}"
    places = {
        who: f"{number.strip()}{'' if alike else purpose}{place}"
        for who, (number, _, purpose, place) in parts.items()
    }
    where = ":" + "".join(f"\n  {who}: {place}" for who, place in places.items())
    if len({*places.values()}) == 1:
        where = parts[who][3]
    return first, where, len({*briefly.values()}) > 1


def _in_words(detail: str) -> str:
    """The detail of a mismatch; in place of numbers that mean nothing to a person, what differs."""
    differs = next((words for mark, words in _DIFFERENCES.items() if mark in detail), "")
    return f"they differ in {differs}" if differs else detail


def _waited(detail: str) -> str:
    """Torch's words "Timed out waiting …ms", which programs look for; time as in ``detail``."""
    seconds = re.search(r"within ([0-9.e+-]+) s", detail)
    return "Timed out waiting" + (f" {float(seconds[1]) * 1000:g}ms" if seconds else "")


def _with_ranks(ranks: Sequence[int], text: str) -> str:
    """An abort's text, with the global ranks at fault in front for the other ranks to read."""
    return f"{','.join(map(str, ranks))};{text}"


def _without_ranks(text: str) -> tuple[list[int], str]:
    numbers, _, rest = text.partition(";")
    decimal = [number for number in numbers.split(",") if number.isascii() and number.isdecimal()]
    return [int(number[:9]) for number in decimal], rest


def label(tensor: Tensor) -> str:
    """A tensor's dtype and shape, for a person."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
