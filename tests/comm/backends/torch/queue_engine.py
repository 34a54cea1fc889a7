"""An asynchronous engine for tests, which behaves as NCCL does: calls are queued on a stream, run
there in the order of the calls, compare nothing, and hang where ranks disagree, until an abort.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

import tilework.distributed as dist
from tilework.comm.backends.threads.reference import combine
from tilework.comm.backends.torch.comparing import compared
from tilework.comm.backends.torch.movers import StreamMover, end_connections
from tilework.comm.backends.torch.torch_engines import EngineGroup, make_gloo_backend
from tilework.comm.per_call.callsite import in_library

in_library[__file__] = True  # threads of engines call nothing


class QueueWork:
    """The Work of a queued call."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.error: RuntimeError | None = None

    def wait(self, limit: timedelta | None = None) -> None:
        self.ended.wait()
        if self.error is not None:
            raise self.error

    def is_completed(self) -> bool:
        return self.ended.is_set()


class Device:
    """The memory in which the ranks of a group, which are threads, leave what they send."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.posted: dict[Any, list[Tensor]] = defaultdict(list)


_devices: dict[str, Device] = {}
_serial = itertools.count()


_Stream = SimpleQueue[tuple[Callable[[], None], QueueWork] | None]


class QueueBackend:
    """Has the methods of torch's backend objects."""

    def __init__(self, request: dist.DistributedBackendOptions) -> None:
        self.rank_, self.size_ = request.group_rank, request.group_size
        if self.rank_ == 0:
            name = str(next(_serial))
            _devices[name] = Device()
            request.store.set("device", name)
        self.device = _devices[request.store.get("device").decode()]
        self.aborted = False
        self.streams: dict[Any, tuple[_Stream, threading.Thread]] = {}
        self._calls, self._sent = itertools.count(), defaultdict[Any, int](int)

    def size(self) -> int:
        return self.size_

    def _run(self, stream: _Stream) -> None:
        for act, work in iter(stream.get, None):
            try:
                act()
            except RuntimeError as error:
                work.error = error
            except (IndexError, ValueError):  # ranks disagree
                with self.device.changed:
                    self.device.changed.wait_for(lambda: self.aborted)
                work.error = RuntimeError("communicator was aborted")
            work.ended.set()

    def queue(self, act: Callable[[], None], key: Any = None) -> QueueWork:
        """Queue a call on a stream: collectives have one, the messages of two ranks others."""
        work = QueueWork()
        if key not in self.streams:
            stream: _Stream = SimpleQueue()
            thread = threading.Thread(target=self._run, args=(stream,), daemon=True)
            thread.start()
            self.streams[key] = stream, thread
        self.streams[key][0].put((act, work))
        return work

    def take(self, key: Any, count: int) -> list[Tensor]:
        """What was posted under ``key``, once there is as much."""
        with self.device.changed:
            self.device.changed.wait_for(
                lambda: self.aborted or len(self.device.posted[key]) >= count
            )
            if self.aborted:
                raise RuntimeError("communicator was aborted")
            return self.device.posted[key]

    def post(self, key: Any, tensor: Tensor) -> None:
        with self.device.changed:
            self.device.posted[key].append(tensor.clone())
            self.device.changed.notify_all()

    def exchange(self, parts: list[Tensor], finish: Callable[[list[list[Tensor]]], None]) -> Any:
        """Queue a collective: each rank posts parts, and ``finish`` gets those of all ranks."""
        number = next(self._calls)

        def act() -> None:
            with self.device.changed:
                self.device.posted["call", number, self.rank_] += [
                    part.clone() for part in parts
                ] or [torch.empty(0)]
                self.device.changed.notify_all()
            finish([self.take(("call", number, rank), 1) for rank in range(self.size_)])

        return self.queue(act)

    def barrier(self, options: Any) -> Any:
        return self.exchange([], lambda parts: None)

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        (tensor,) = tensors
        return self.exchange(tensors, lambda parts: _reduce(parts, 0, tensor, options))

    def reduce(self, tensors: list[Tensor], options: Any) -> Any:
        def finish(parts: list[list[Tensor]]) -> None:
            if self.rank_ == options.rootRank:
                _reduce(parts, 0, tensors[0], options)

        return self.exchange(tensors, finish)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        return self.exchange(tensors, lambda parts: _copy(tensors[0], parts[options.rootRank][0]))

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any) -> Any:
        def finish(parts: list[list[Tensor]]) -> None:
            for output, part in zip(outputs[0], parts, strict=True):
                _copy(output, part[0])

        return self.exchange(inputs, finish)

    def _allgather_base(self, output: Tensor, source: Tensor, options: Any) -> Any:
        return self.allgather([list(output.chunk(self.size_))], [source], options)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any) -> Any:
        return self.allgather(outputs or [[torch.empty(0)] * self.size_], inputs, options)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], options: Any) -> Any:
        def finish(parts: list[list[Tensor]]) -> None:
            _copy(outputs[0], parts[options.rootRank][self.rank_])

        return self.exchange(inputs[0] if inputs else [], finish)

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], options: Any
    ) -> Any:
        return self.exchange(
            inputs[0], lambda parts: _reduce(parts, self.rank_, outputs[0], options)
        )

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, options: Any) -> Any:
        return self.reduce_scatter([output], [list(source.view(-1).chunk(self.size_))], options)

    def alltoall_base(
        self, target: Tensor, source: Tensor, came: list[int], went: list[int], options: Any
    ) -> Any:
        went = went or [source.numel() // self.size_] * self.size_
        came = came or [target.numel() // self.size_] * self.size_

        def finish(parts: list[list[Tensor]]) -> None:
            for output, part in zip(torch.split(target, came), parts, strict=True):
                _copy(output, part[self.rank_])

        return self.exchange(list(torch.split(source, went)), finish)

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> Any:
        key = self.rank_, dst
        return self.queue(lambda: self.post(key, tensors[0]), key)

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> Any:
        number = self._sent[src]
        self._sent[src] += 1
        key = src, self.rank_
        return self.queue(lambda: _copy(tensors[0], self.take(key, number + 1)[number]), key)

    def abort(self) -> None:
        self.aborted = True
        with self.device.changed:
            self.device.changed.notify_all()

    def shutdown(self) -> None:
        for stream, _ in self.streams.values():
            stream.put(None)
        for _, thread in self.streams.values():
            thread.join(0.0 if self.aborted else 30.0)


class GlooQueue(QueueBackend):
    """The same between processes: a stream runs Gloo's calls."""

    def __init__(self, request: dist.DistributedBackendOptions) -> None:
        self.aborted, self.streams = False, {}
        self.gloo = make_gloo_backend(request, None)
        self.end = partial(end_connections, self.gloo, request.group_rank, request.group_size)

    def __getattribute__(self, name: str) -> Any:
        if name not in CALLED:
            return super().__getattribute__(name)
        method = getattr(self.gloo, name)
        return lambda *args: self.queue(lambda: method(*args).wait(), name)

    def abort(self) -> None:
        self.aborted = True
        self.end()


#: The methods that run on the stream.
CALLED = ("allreduce", "broadcast", "barrier", "send", "recv")


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy bytes, as many as both have: the engine compares nothing."""
    count = min(target.nbytes, source.nbytes)
    with torch.inference_mode(), suppress(RuntimeError):
        to, of = (each.view(-1).view(torch.uint8) for each in (target, source))
        to[:count].copy_(of[:count])


def _reduce(parts: list[list[Tensor]], place: int, target: Tensor, options: Any) -> None:
    tensors = [part[min(place, len(part) - 1)].view(-1) for part in parts]
    least = min(tensor.numel() for tensor in tensors)
    name = str(options.reduceOp.op).rpartition(".")[2].lower()
    if len({tensor.dtype for tensor in tensors}) == 1:
        _copy(target, combine([tensor[:least] for tensor in tensors], name, ()))


class QueueGroup(EngineGroup):
    """A group on the engine of this module."""


def create_queue_group(request: dist.DistributedBackendOptions, options: object) -> QueueGroup:
    mover = StreamMover(QueueBackend(request), request, "queue")
    return QueueGroup(compared(mover, request), request)


def create_gloo_queue_group(request: dist.DistributedBackendOptions, options: object) -> QueueGroup:
    mover = StreamMover(GlooQueue(request), request, "gloo_queue")
    return QueueGroup(compared(mover, request), request)


def register() -> None:
    """Make backends ``queue``, of threads, and ``gloo_queue``, of processes."""
    dist.Backend.register_backend("queue", create_queue_group, True, ["cpu"])
    dist.Backend.register_backend("gloo_queue", create_gloo_queue_group, True, ["cpu"])
