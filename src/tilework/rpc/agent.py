"""The RPC engine of a rank: the calls that the rank makes, and the calls that it serves."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from tilework.comm.per_call.internal import Site, run_soon, user_frame
from tilework.errors import DistError, RpcTimeoutError
from tilework.memory_files import MemoryFile
from tilework.rpc.calls import (
    BlockingCall,
    Calls,
    CreatingCall,
    FutureCall,
    InFlight,
    RemoteCall,
    Task,
)
from tilework.rpc.functions import is_async
from tilework.rpc.futures import Gatherings, Key, Later, RpcFuture
from tilework.rpc.message import NO_FILE, MessageKind, Ref, RpcMessage, decode, encode
from tilework.rpc.payload import Received, RemoteFailure, Sender
from tilework.rpc.references import Owned
from tilework.rpc.rref import Request, RRef, current_agent, fill
from tilework.rpc.shared_buffers import MappedBuffers, SharedBufferPool
from tilework.rpc.transport import Transport
from tilework.rpc.workers import Directory, Timeout, timeout_seconds


class ThreadPool:
    """Threads that take turns at receiving a task; the thread that received it runs it.

    No task is handed from thread to thread. Before a thread runs a task, it leaves the turn to
    another thread: a function that blocks holds up no messages. ``receive`` waits for the next
    task, and returns None at the end; ``idle`` threads are kept for later tasks.
    """

    def __init__(self, receive: Callable[[], Task | None], idle: int, name: str) -> None:
        self._receive, self._keep, self._name = receive, idle, name
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        #: Threads that receive, or wait for their turn.
        self._idle: set[threading.Thread] = set()
        self._ended = False

    def start(self) -> None:
        with self._lock:
            self._add()

    def _add(self) -> None:
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        # Without one more thread, messages wait until a task has ended.
        with contextlib.suppress(RuntimeError):
            thread.start()
            self._idle.add(thread)

    def _work(self) -> None:
        me = threading.current_thread()
        while True:
            with self._turn:
                task = None if self._ended else self._receive()
                if task is None:
                    self._ended = True
                    return
                with self._lock:
                    self._idle.discard(me)
                    if not self._idle:
                        self._add()
            task()
            del task  # what it holds must not live until the next one
            with self._lock:
                if len(self._idle) >= self._keep:
                    return
                self._idle.add(me)

    def join(self) -> None:
        """Wait until no thread receives. Call this once ``receive`` returns None or soon will."""
        with self._lock:
            idle = list(self._idle)
        for thread in idle:
            if thread is not threading.current_thread():
                thread.join()


_log = logging.getLogger(__name__)

#: Seconds in which messages of a rank that is gone are still read, before calls to it fail.
_GRACE_SECONDS: Final = 0.1


class Agent:
    """The RPC engine of a rank: makes calls to other workers, and serves the calls that they make.

    The agent closes the transport and the shared buffers. A rank's probe tests whether this rank
    can open that rank's memory files.
    """

    def __init__(  # noqa: PLR0913
        self,
        rank: int,
        workers: Directory,
        transport: Transport,
        shared_buffers: SharedBufferPool,
        probes: Sequence[MemoryFile],
        rpc_timeout: float,
        idle_threads: int,
    ) -> None:
        self.rank, self.workers, self.rpc_timeout = rank, workers, rpc_timeout
        self.sender = Sender(rank, transport, shared_buffers, probes)
        self.references = self.sender.references
        self.gatherings = Gatherings()
        self._transport, self._shared_buffers, self._probes = transport, shared_buffers, probes
        self._mapped_buffers = MappedBuffers(transport.wake)
        self._calls = Calls()
        #: Calls of RPC's own that this rank has not answered yet.
        self._answering = InFlight()
        self._losing: list[tuple[float, int]] = []
        self._closed = False
        self._stopped = False
        self._closing = threading.Lock()
        self._context = contextvars.copy_context()
        me = f"rpc {workers.find(rank).name}"
        self._threads = ThreadPool(self._next_task, idle_threads, me)
        self._watcher = threading.Thread(target=self._watch, name=f"{me} watch", daemon=True)

    def start(self, addresses: Sequence[str]) -> None:
        """Begin to send and receive; ``addresses`` has the address of each rank, in their order."""
        self._transport.know(addresses, self.sender.hello)
        self._watcher.start()
        self._threads.start()

    # -- calling ---------------------------------------------------------------------------

    def call(self, request: Request) -> Any:
        call = BlockingCall(**self._about(request))
        return self._wait(call, self._issue(call, _job(request)))

    def _wait(self, call: BlockingCall, number: int) -> Any:
        try:
            return call.wait()
        except BaseException:  # an interrupt, mostly; a call that has ended is not there any more
            if self._calls.pop(number) is not None:
                self._calls.ended(call)
            raise

    def call_async(self, request: Request) -> RpcFuture[Any]:
        call = FutureCall(**self._about(request))
        self._issue(call, _job(request))
        return call.future

    def remote(self, request: Request) -> RRef[Any]:
        """Call a function on a rank that keeps the result; return an RRef to it at once."""
        about = self._about(request)
        entry, ref = self.references.create(about["to"].id)
        rref = RRef.of(self, entry)
        job: tuple[Any, ...] = (fill, (rref, *_job(request)), {})
        self._issue(CreatingCall(**about, entry=entry), job, ref)
        return rref

    def gather(self, purpose: str, ranks: tuple[int, ...], obj: Any, timeout: Timeout) -> Any:
        """Exchange objects among ``ranks`` with one ``purpose``, by rank. Collective; blocks."""
        # RPC's own purposes are not work of the program.
        call = BlockingCall(**self._about(Request(ranks[0], _arrive, (), {}, timeout)), inner=True)
        with self.gatherings.joining(purpose, ranks) as key:
            number = self._issue(call, (_arrive, (key, self.rank, obj), {}))
        return self._wait(call, number)

    def _about(self, request: Request) -> dict[str, Any]:
        fn = request.fn
        if not callable(fn):
            raise TypeError(f"a function to call on another rank must be callable, got {fn!r}")
        frame = user_frame(sys._getframe(2))
        site: Site | None = (frame.f_code, frame.f_lasti) if frame is not None else None
        return {
            "to": self.workers.find(request.to),
            "what": getattr(fn, "__qualname__", None) or repr(fn),
            "site": site,
            "timeout": timeout_seconds(request.timeout, self.rpc_timeout),
        }

    def _issue(self, call: RemoteCall, job: tuple[Any, ...], new: Ref | None = None) -> int:
        to = call.to.id
        parts, refs = self.sender.pack(job, to, new)
        number, wake = self._calls.add(call)
        if wake:
            self._transport.wake()
        kind = MessageKind.INNER_CALL if call.inner else MessageKind.CALL
        sent = self.sender.post(kind, to, number, parts, refs) and not self._closed
        if not sent and self._calls.pop(number) is not None:
            self._calls.ended(call)
            raise _closed_error(call) if self._closed else call.lost()
        return number

    # -- receiving: on the pool's threads ----------------------------------------------------

    def _next_task(self) -> Task | None:
        """Receive messages until one leaves work that may take long, or the agent is closed."""
        while not self._stopped:
            task = self._handle(self._transport.receive())
            if task is not None:
                return partial(self._context.copy().run, task)
        return None

    def _handle(self, frames: Sequence[Any]) -> Task | None:
        """Handle a message; return long work, or None. A function, to free the message."""
        try:
            return self._take(decode(frames))
        except Exception:  # our bug; the others' messages must be handled
            _log.exception("rank %d dropped a message", self.rank)
            return None

    def _take(self, message: RpcMessage) -> Task | None:  # noqa: C901, PLR0912
        """Do the quick work of a message, in the order of messages; return slow work, or None."""
        sender, number = message.sender, message.number
        self._transport.contact(sender)
        match message.kind:
            case MessageKind.CALL | MessageKind.INNER_CALL:
                if message.kind == MessageKind.INNER_CALL:
                    self._answering.begin()
                return partial(self._serve, self._unwrap(message))
            case MessageKind.RESULT | MessageKind.ERROR:
                received, call = self._unwrap(message), self._calls.pop(number)
                if call is not None:  # it was neither late nor given up
                    return self._finish(call, partial(self._outcome, call, received))
            case MessageKind.HELLO:
                if number:
                    self.sender.readers.add(sender)
            case MessageKind.TAKEN:
                self._shared_buffers.taken(number)
            case MessageKind.RETURNED:
                if self._shared_buffers.returned(number):
                    self._transport.wake()
            case MessageKind.ADD:
                self.references.add(message.refs[0], sender, number)
            case MessageKind.ADDED:
                self.references.added(number)
            case MessageKind.HOLDS:
                self.references.holds(number)
            case MessageKind.STOP:
                self._stopped = True
            case MessageKind.DROP:
                freed = self.references.drop(message.refs[0].id, sender, number)
                return None if freed is None else partial(_let_go, [freed])
        return None

    def _unwrap(self, message: RpcMessage) -> Received:
        refs = [
            RRef.of(self, self.references.incoming(ref, message.sender)) for ref in message.refs
        ]
        return Received(message, refs, self._open(message) if message.file != NO_FILE else None)

    def _open(self, message: RpcMessage) -> Any:
        """The contents of the message's memory file, mapped; the OSError if it cannot be opened."""
        sender, (number, returning) = message.sender, message.file
        pid = self._probes[sender].pid
        try:
            contents: Any = self._mapped_buffers.map(
                sender, pid, number, message.file_bytes, returning
            )
        except OSError as error:
            contents, returning = error, False
        if not returning:
            self.sender.notify(MessageKind.TAKEN, sender, number)
        return contents

    def _outcome(self, call: RemoteCall, received: Received) -> Any:
        """The result in the answer ``received`` to ``call``; raises the exception in the answer."""
        if received.lacks_memory and not self._probes[received.message.sender].is_reachable():
            raise call.lost()  # it answered and died before this rank opened the memory
        result = received.load()
        if received.message.kind == MessageKind.ERROR:
            raise result.rebuild(self.workers.find(received.message.sender))
        return result

    def _finish(self, call: RemoteCall, outcome: Callable[[], Any]) -> Task | None:
        task = call.finish(outcome)
        if task is None:
            self._calls.ended(call)
            return None

        def finish() -> None:
            try:
                task()
            finally:
                self._calls.ended(call)

        return finish

    # -- serving ---------------------------------------------------------------------------

    def _serve(self, received: Received) -> None:
        message = received.message
        try:
            fn, args, kwargs = received.load()
        except BaseException as error:
            received.fail_new(error)
            self._answer(message, partial(_raise, error))
            return
        try:
            result = fn(*args, **kwargs)
            if is_async(fn):
                result = Later.of(fn, result)
        except BaseException as error:
            self._answer(message, partial(_raise, error))
            return
        if isinstance(result, Later):
            result.future.add_done_callback(lambda done: self._answer(message, done.value))
        else:
            self._answer(message, lambda: result)

    def _answer(self, message: RpcMessage, outcome: Callable[[], Any]) -> None:
        to, number = message.sender, message.number
        try:
            kind, (parts, refs) = MessageKind.RESULT, self.sender.pack(outcome(), to)
        except BaseException as error:
            kind, (parts, refs) = MessageKind.ERROR, self.sender.pack(RemoteFailure.of(error), to)
        self.sender.post(kind, to, number, parts, refs)
        if message.kind == MessageKind.INNER_CALL:
            self._answering.end()

    # -- watching: on a separate thread --------------------------------------------------------

    def _watch(self) -> None:
        """End late calls and calls to lost ranks; report dropped values and files to the others."""
        while not self._closed:
            next_loss = self._losing[0][0] if self._losing else math.inf
            until = self._calls.sleep_until(min(next_loss, self._shared_buffers.tidy()))
            lost = self._transport.watch(until - time.monotonic())
            now = time.monotonic()
            self._losing += [(now + _GRACE_SECONDS, rank) for rank in lost]
            while self._losing and self._losing[0][0] <= now:
                self._lose(self._losing.pop(0)[1])
            for number in self._calls.late(now):
                self._end(number, RemoteCall.late)
            self.references.flush()
            for rank, file, again in self._mapped_buffers.released():
                self.sender.notify(MessageKind.RETURNED if again else MessageKind.TAKEN, rank, file)

    def _lose(self, rank: int) -> None:
        self._transport.give_up(rank)
        for number in self._calls.numbers(lambda call: call.to.id == rank):
            self._end(number, RemoteCall.lost)
        self._shared_buffers.lost(rank)
        run_soon(partial(_let_go, self.references.lost(rank)))
        run_soon(partial(self.gatherings.lose, rank))

    def _end(self, number: int, reason: Callable[[RemoteCall], BaseException]) -> None:
        call = self._calls.pop(number)
        if call is None:
            return
        task = self._finish(call, partial(_raise, reason(call)))
        if task is not None:
            run_soon(partial(self._context.copy().run, task))

    # -- leaving ---------------------------------------------------------------------------

    def finish(self, timeout: Timeout) -> None:
        """Wait until no worker has a call that has not ended. Collective.

        A worker that is idle now may become busy again: a function that still runs elsewhere may
        call it. Therefore all workers exchange the number of calls that each has ever made, until
        two exchanges in a row agree.
        """
        deadline = time.monotonic() + timeout_seconds(timeout, math.inf)
        ranks = tuple(range(len(self.workers)))
        before, now = None, {-1: 0}
        while before != now:
            if not self._calls.work.wait_none(deadline):
                raise RpcTimeoutError("shutdown: calls of this rank did not end in time")
            left = max(0.001, deadline - time.monotonic())
            before, now = now, self.gather("shutdown", ranks, self._calls.work.total, left)
        self._answering.wait_none(deadline)

    def close(self, linger_seconds: float = 0.0) -> None:
        """Leave RPC without waiting for other ranks; calls that have not ended fail. Idempotent."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        for number in self._calls.numbers(lambda call: True):
            self._end(number, _closed_error)
        self._transport.send(self.rank, encode(MessageKind.STOP, self.rank, 0))
        self._transport.wake()
        if threading.current_thread() is not self._watcher:
            self._watcher.join()
        self._threads.join()
        self._transport.close(linger_seconds)
        self._shared_buffers.close()
        self.references.close()


def _job(request: Request) -> tuple[Any, ...]:
    return request.fn, tuple(request.args), dict(request.kwargs)


def _arrive(key: Key, rank: int, obj: Any) -> Later:
    """Add ``obj`` of ``rank`` to gathering ``key``; runs on the rank that collects the objects."""
    return current_agent().gatherings.arrive(key, rank, obj)


def _raise(error: BaseException) -> Any:
    raise error


def _let_go(entries: list[Owned]) -> None:
    """Release the values of ``entries``; runs on a thread where their finalizers may block."""
    entries.clear()


def _closed_error(call: RemoteCall) -> BaseException:
    return DistError(f"RPC was shut down on this rank before {call.what} returned")
