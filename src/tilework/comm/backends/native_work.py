"""The Works of native groups: operations in flight."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context, copy_context
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from tilework.comm.backends.engine_protocol import Completion, Engine, FaultArgs
from tilework.comm.backends.shm.memory_hold import HeldMemory, fits_storage
from tilework.comm.backends.tensor_memory import unseen
from tilework.comm.contract import MessageWait, Work, seconds_of
from tilework.comm.flight.ring import Ring, Slot
from tilework.comm.per_call import profiling
from tilework.comm.per_call.callbacks import callback_ended, expect_callback, run_soon
from tilework.comm.per_call.callsite import call_site
from tilework.errors import CollectiveTimeoutError, DistBackendError


class CallGroup(Protocol):
    """The part of a native group that Works use."""

    @property
    def engine(self) -> Engine: ...
    @property
    def flight(self) -> Ring: ...
    @property
    def global_ranks(self) -> tuple[int, ...]: ...

    #: The error of an operation that failed while nobody waited for it; and whether the program has
    #: seen a failure of the group.
    unseen_error: DistBackendError | None
    failure_seen: bool

    def explain(self, fault: FaultArgs, title: str, site: str) -> DistBackendError: ...
    def note_failure(self, slot: Slot, error: DistBackendError) -> None: ...
    def note_interruption(self, slot: Slot, error: BaseException, title: str) -> None: ...


@dataclass(slots=True)
class Effects:
    """The effects of a finished operation on this rank's tensors."""

    #: The user's tensors that hold the result.
    outputs: list[Tensor]
    #: The outputs that the operation wrote.
    written: list[Tensor]
    #: Stand-ins for non-contiguous outputs: (the user's tensor, a contiguous stand-in).
    copy_back: list[tuple[Tensor, Tensor]]

    @unseen
    def settle(self) -> None:
        """Copy the stand-ins to the user's tensors, and raise the versions of written tensors."""
        for tensor, memory in self.copy_back:
            if not fits_storage(tensor):  # the tensor was resized during the operation
                continue
            with torch.inference_mode(tensor.is_inference()):
                tensor.copy_(memory)
        mark_written(self.written)


@unseen
def mark_written(tensors: Sequence[Tensor]) -> None:
    """Raise tensors' versions, so that backward refuses an overwritten saved tensor."""
    written = [tensor for tensor in tensors if not tensor.is_inference()]
    # A subclass may wrap another tensor with the values; detaching it gives that tensor.
    plain_types = (Tensor, torch.nn.Parameter)
    increment_version([t if type(t) in plain_types else t.detach() for t in written])


class NativeWork(Work):
    """An operation in flight on a group's engine, at a slot of the group's flight record."""

    #: The profiler's event, if the profiler was on at the start.
    _event: profiling.ProfilerEvent | None = None
    _future: torch.futures.Future[list[Tensor]] | None = None
    _error: DistBackendError | None = None
    _finished = False
    _completion: Completion

    def __init__(self, group: CallGroup, slot: Slot) -> None:
        self.group = group
        self._slot = slot
        self._lock = threading.Lock()

    @abstractmethod
    def title(self) -> str:
        """The operation, for a person."""

    @abstractmethod
    def site(self) -> str:
        """The caller's ``file:line in function``."""

    @abstractmethod
    def outputs(self) -> list[Tensor]:
        """The user's tensors that hold the result."""

    @abstractmethod
    def settle(self) -> None:
        """Copy and mark results, and record the end. Called once, after a success."""

    @abstractmethod
    def let_go(self) -> None:
        """Release the tensors of the operation. Called once, after the end."""

    def message_wait(self) -> MessageWait | None:
        """This Work as a wait for a message (a send or receive); None if it is a collective."""
        return None

    def wait(self, timeout: timedelta | None = None) -> bool:
        seconds = -1.0 if timeout is None else seconds_of(timeout)
        try:
            if self._event is None or not profiling.profiled():
                done = self._completion.wait(seconds)
            else:
                with self._event.of_waiting():
                    done = self._completion.wait(seconds)
        except self.group.engine.fault_type as fault:
            if not self._completion.done():  # impossible: the group is closed, or forked
                raise self.group.explain(fault.args, self.title(), self.site()) from None
            done = True
        except BaseException as interruption:
            self.group.note_interruption(self._slot, interruption, self.title())
            raise
        if not done:
            raise CollectiveTimeoutError(
                f"{self.title()}: Timed out waiting {seconds * 1000:g}ms: the operation is "
                f"still running; wait again or abort the group"
            )
        self._finish()
        if self._error is not None:
            self.group.failure_seen = True
            raise self._error
        return True

    def is_completed(self) -> bool:
        done = self._completion.poll()
        if done:
            self._finish()
        return done

    def exception(self) -> BaseException | None:
        if not self.is_completed() or self._error is None:
            return None
        self.group.failure_seen = True
        return self._error

    def result(self) -> list[Tensor]:
        if not self.is_completed():
            raise RuntimeError(f"{self.title()} is still running: wait() for it first")
        return list(self.outputs())

    def source_rank(self) -> int:
        self.wait()
        return self.group.global_ranks[self._completion.source()]

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        with self._lock:
            if self._future is not None:
                return self._future
            # Who takes the value waits, on a stream, for the stream that completed the future.
            devices = {tensor.device for tensor in self.outputs() if tensor.is_cuda}
            self._future = torch.futures.Future(devices=[*devices])
        expect_callback()
        # Callbacks may wait for further operations, so they must not run on the thread that carries
        # the group's operations.
        here = copy_context()  # knows which rank this is
        self._completion.add_done_callback(
            lambda: run_soon(lambda: here.run(self._complete_future))
        )
        return self._future

    def _complete_future(self) -> None:
        future = self._future
        assert future is not None
        try:
            with contextlib.suppress(self.group.engine.fault_type):
                self._completion.wait(-1.0)  # for data on a device's streams
            self._finish()
            if self._error is not None:
                error: Any = self._error  # torch annotates it wrongly
                self.group.failure_seen = True
                future.set_exception(error)
            else:
                future.set_result(list(self.outputs()))
        finally:
            callback_ended()

    def _finish(self, unseen: bool = False) -> None:
        """Settle the operation or keep its error, once. ``unseen``: nobody may wait for it."""
        with self._lock:
            if self._finished:
                return
            fault = self._completion.fault()
            if fault is None:
                self.settle()
            else:
                self._error = self.group.explain(fault, self.title(), self.site())
                self.group.note_failure(self._slot, self._error)
                if unseen and fault[0] not in ("closed", "aborted"):
                    self.group.unseen_error = self._error
            self._finished = True
            self.let_go()


class EngineWork(NativeWork):
    """An operation handed to an engine. Keeps buffers alive until the end."""

    def __init__(
        self,
        group: CallGroup,
        title: str,
        effects: Effects,
        kept: object,
        slot: Slot,
        hold: HeldMemory | None,
    ) -> None:
        super().__init__(group, slot)
        self._title = title
        self._site = call_site()
        self._effects = effects
        #: The tensors that the engine reads and writes; the engine keeps them alive too.
        self._kept = kept
        self._hold = hold

    def title(self) -> str:
        return self._title

    def site(self) -> str:
        return self._site

    def outputs(self) -> list[Tensor]:
        return self._effects.outputs

    def start(
        self, submit: Callable[[], Completion], event: profiling.ProfilerEvent | None = None
    ) -> EngineWork:
        """Call ``submit``, which starts the operation; raise at once if that fails."""
        self._event = event
        try:
            if event is None:
                self._completion = submit()
            else:
                with event:
                    self._completion = submit()
        except self.group.engine.fault_type as fault:
            self._release_memory()
            error = self.group.explain(fault.args, self._title, self._site)
            self.group.failure_seen = True
            self.group.note_failure(self._slot, error)
            raise error from None
        except BaseException as error:
            if isinstance(error, Exception):  # else the operation may have been submitted
                self._release_memory()
            self.group.flight.end(self._slot, f"{type(error).__name__}: {error}")
            raise
        self.group.flight.follow(self._slot, self._completion)
        if self.group.engine.watches:
            here = copy_context()  # knows which rank this is
            self._completion.add_done_callback(lambda: self._notice(here))
        return self

    def _notice(self, here: Context) -> None:
        """Explain a failure, and abort the group, although nobody may wait."""
        if self._completion.fault() is not None:
            run_soon(lambda: here.run(self._finish, True))

    def __del__(self) -> None:
        # Nobody waits for the operation any more: release the tensors as soon as it is done.
        kept, completion = self._kept, getattr(self, "_completion", None)
        if kept is not None and completion is not None:
            engine, hold = self.group.engine, self._hold

            def let_go() -> None:
                engine.let_go(kept)
                if hold is not None:
                    hold.release()

            with contextlib.suppress(Exception):  # the interpreter may be about to end
                completion.add_done_callback(let_go)

    def settle(self) -> None:
        self.group.flight.end(self._slot)
        if self._hold is not None:
            self._hold.copy_to_moved()
        self._effects.settle()

    def let_go(self) -> None:
        kept, self._kept = self._kept, None
        self.group.engine.let_go(kept)
        self._release_memory()

    def _release_memory(self) -> None:
        if self._hold is not None:
            self._hold.release()


class _ThisThread(threading.local):
    """Of each thread: the send or receive that the thread waits for; None if there is none."""

    message: NativeWork | None = None


_this_thread = _ThisThread()


def awaited_message() -> NativeWork | None:
    """The send or receive that the calling thread waits for; None if there is none."""
    return _this_thread.message


@contextlib.contextmanager
def waiting_for(message: NativeWork) -> Iterator[None]:
    """Within the block, :func:`awaited_message` returns ``message`` on the calling thread."""
    _this_thread.message = message
    try:
        yield
    finally:
        _this_thread.message = None


class MessageWork(EngineWork):
    """A send or receive that was handed to an engine."""

    #: The group rank at the other end; -1: any.
    peer = -1
    _begun = 0.0

    def message_wait(self) -> MessageWait:
        return MessageWait(self.peer, self._title, self._site, self._begun)

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._completion.done():
            return super().wait(timeout)
        self._begun = time.monotonic()
        with waiting_for(self):
            return super().wait(timeout)
