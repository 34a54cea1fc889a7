"""The ``mpi`` backend on mpi4py, for a torch that was built without MPI; also hybrid's link.

Tensors go by address, in calls that do not block, and waiting threads poll. So a wait can end at a
timeout, or when the group is aborted. MPI shows nothing else about ranks. The ranks meet in the
store first, because MPI would wait for a missing rank without a limit.
"""

from __future__ import annotations

import atexit
import importlib
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from tilework.comm.backend import DistributedBackendOptions
from tilework.comm.backends.tensor_memory import as_bytes
from tilework.comm.backends.threads.reference import combine
from tilework.comm.backends.torch.compared_engine import ComparedEngine
from tilework.comm.backends.torch.comparing import compared
from tilework.comm.backends.torch.movers import Mover
from tilework.comm.backends.torch.torch_calls import OF_TRUTH, kind_of
from tilework.comm.backends.torch.torch_engines import EngineGroup
from tilework.comm.contract import ProcessGroup
from tilework.comm.elastic.watched_store import while_looking
from tilework.comm.forms import Operation, op_type, split_parts
from tilework.comm.reduce_op import REAL_DTYPES, AnyReduceOp, RedOpType
from tilework.errors import DistBackendError

#: Seconds of busy polling; then seconds between looks, in the first second and later.
_BUSY_SECONDS = 0.0002
_LOOK_SECONDS = 0.00002
_LONG_LOOK_SECONDS = 0.001
_SHORT = (torch.float16, torch.bfloat16)

# -- MPI itself -------------------------------------------------------------------------------

_starting = threading.Lock()
#: Works that nobody waits for any more; MPI may still use their memory.
_abandoned: list[MpiWork] = []


@cache
def _started() -> Any:
    """The module mpi4py.MPI, with MPI initialised for threads."""
    is_ours = "mpi4py.MPI" not in sys.modules
    if is_ours:
        importlib.import_module("mpi4py").rc.finalize = False
    try:
        mpi: Any = importlib.import_module("mpi4py.MPI")
    except (ImportError, RuntimeError) as error:
        raise DistBackendError(
            f"mpi4py found no MPI that it can use: {error}; install Open MPI or MPICH, or "
            f"put its libmpi.so where the loader looks (LD_LIBRARY_PATH)"
        ) from error
    if mpi.Query_thread() != mpi.THREAD_MULTIPLE:
        raise DistBackendError(
            "MPI was initialised for one thread; leave it to tilework, or set "
            "mpi4py.rc.thread_level = 'multiple' before the first import of mpi4py.MPI"
        )
    if is_ours:
        atexit.register(_finalize, mpi)
    return mpi


def _finalize(mpi: Any) -> None:
    """End MPI with the process, which waits for every rank, unless an operation was given up."""
    if not _pending() and not mpi.Is_finalized():
        mpi.Finalize()


def _pending() -> bool:
    """True if an operation that was given up is still in flight."""
    _abandoned[:] = [work for work in _abandoned if not work.ended()]
    return bool(_abandoned)


def _mpi() -> Any:
    with _starting:
        return _started()


def connect(request: DistributedBackendOptions) -> Any:
    """Make the MPI communicator of a group. Collective over its ranks; blocks until all came."""
    mpi = _mpi()
    world, store = mpi.COMM_WORLD, request.store
    store.set(f"mpi/{request.group_rank}", str(world.Get_rank()))
    keys = [f"mpi/{rank}" for rank in range(request.group_size)]
    ranks = [int(text) for text in while_looking(lambda: store.multi_get(keys), store)]
    if len(set(ranks)) < len(ranks):
        raise DistBackendError(
            f"the {len(ranks)} ranks of group {request.group_id!r} are not in one job of MPI: "
            f"MPI has only {len(set(ranks))} different ranks for them; start them with the mpirun "
            f"of the MPI that mpi4py uses, or with srun --mpi=pmix (or pmi2)"
        )
    tag = zlib.crc32(request.group_id.encode()) % 32768  # for groups made at once
    try:
        return world.Create_group(world.Get_group().Incl(ranks), tag)
    except mpi.Exception as error:
        raise DistBackendError(f"MPI could not make group {request.group_id!r}: {error}") from error


class MpiWork:
    """Requests of mpi4py in flight, which end together; has the interface of torch's Work.

    ``memory`` is kept alive while MPI may use it, ``limit`` is of waits without an explicit limit,
    and ``after`` is called once the requests have succeeded.
    """

    def __init__(
        self,
        link: MpiLink,
        requests: list[Any],
        memory: object,
        limit: float,
        after: Callable[[], object] | None = None,
    ) -> None:
        self._link = link
        self._requests = requests
        self._memory = memory
        self._limit = limit
        self._after = after
        self._status = link.mpi.Status()

    def wait(self, limit: timedelta | None = None) -> None:
        """Poll until all requests have ended, or RuntimeError at the limit, or after an abort."""
        seconds = self._limit if limit is None else limit.total_seconds()
        begun = time.monotonic()
        while not self.ended():
            took = time.monotonic() - begun
            if (took > seconds or self._link.closed) and not self.ended():
                if self not in _abandoned:
                    _abandoned.append(self)
                why = f"timed out after {took:.2f} s" if took > seconds else "aborted"
                raise RuntimeError(f"{why} while waiting for other ranks")
            if took < _BUSY_SECONDS:
                time.sleep(0)
            else:
                time.sleep(_LOOK_SECONDS if took < 1 else _LONG_LOOK_SECONDS)
        if self._after is not None:
            self._after()

    def ended(self) -> bool:
        """True once all requests ended; raises MPI's error of a failed request."""
        if len(self._requests) == 1:
            return bool(self._requests[0].Test(self._status))
        return bool(self._link.mpi.Request.Testall(self._requests))

    is_completed = ended

    def _source_rank(self) -> int:
        return int(self._status.Get_source())


class _FromAny(MpiWork):
    """A receive from any rank, begun once a message is there: MPICH 5.0 on UCX needs that."""

    def __init__(self, link: MpiLink, tensor: Tensor, tag: int, limit: float) -> None:
        super().__init__(link, [], tensor, limit)
        self._begin: Callable[[], Any] = partial(
            link.comm.Improbe, link.mpi.ANY_SOURCE, tag, self._status
        )
        self._buffer = link.buffer(tensor)

    def ended(self) -> bool:
        if not self._requests:
            message = self._begin()
            if message is None:
                return False
            self._requests.append(message.Irecv(self._buffer))
        return super().ended()


class MpiLink:
    """Sends and receives tensors over a communicator of its own, by torch's names of methods."""

    def __init__(self, comm: Any, limit: timedelta) -> None:
        self.mpi = _mpi()
        self.comm = comm
        self.closed = False
        self._limit = limit.total_seconds()
        self._tags = int(self.mpi.COMM_WORLD.Get_attr(self.mpi.TAG_UB))

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> MpiWork:
        """Begin to send ``tensors[0]``, a tensor of bytes, to ``rank``."""
        request = self.comm.Isend(self.buffer(tensors[0]), rank, self._checked(tag))
        return self.work([request], tensors)

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> MpiWork:
        """Begin to receive into ``tensors[0]``, a tensor of bytes, from ``rank``."""
        request = self.comm.Irecv(self.buffer(tensors[0]), rank, self._checked(tag))
        return self.work([request], tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> MpiWork:
        """Begin to receive into ``tensors[0]`` from the rank that sends first."""
        return _FromAny(self, tensors[0], self._checked(tag), self._limit)

    def _checked(self, tag: int) -> int:
        if tag >= self._tags:
            raise ValueError(
                f"tags of this MPI are below {self._tags}, got {tag}; use a smaller tag"
            )
        return tag

    def work(
        self,
        requests: list[Any],
        memory: object,
        limit: float | None = None,
        after: Callable[[], object] | None = None,
    ) -> MpiWork:
        """The :class:`MpiWork` of requests; without ``limit`` (seconds), waits have the link's."""
        return MpiWork(self, requests, memory, self._limit if limit is None else limit, after)

    def buffer(self, tensor: Tensor) -> list[Any]:
        """A contiguous tensor's memory and type for mpi4py, without a copy."""
        memory = self.mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
        return [memory, self._type(tensor.dtype)]

    def _type(self, dtype: torch.dtype) -> Any:
        name = str(dtype).removeprefix("torch.")
        if dtype in _SHORT:
            return self.mpi.UINT16_T
        known = {
            "float64": "DOUBLE",
            "float32": "FLOAT",
            "complex64": "C_FLOAT_COMPLEX",
            "complex128": "C_DOUBLE_COMPLEX",
            "bool": "UINT8_T",
            "uint8": "BYTE",
        }
        return getattr(self.mpi, known.get(name, f"{name.upper()}_T"))

    def abort(self) -> None:
        """Make the waits of this rank fail."""
        self.closed = True

    def close(self, is_unused: bool) -> None:
        """Make this rank's waits fail; free the communicator if ``is_unused``: no message left."""
        if is_unused and not self.closed and not _pending():
            self.comm.Free()
        self.closed = True


# -- collectives ------------------------------------------------------------------------------


@cache
def _own_op(dtype: torch.dtype, kind: str) -> Any:
    """An MPI operator for the reduction ``kind`` of a 16-bit float, which MPI itself lacks."""

    def add(source: Any, target: Any, _: object) -> None:
        parts = [torch.frombuffer(memory, dtype=dtype) for memory in (source, target)]
        parts[1].copy_(combine(parts, kind, ()))

    return _mpi().Op.Create(add, commute=True)


class _Requests:
    """A rank's part of a collective, to be started as requests of MPI."""

    def __init__(self, link: MpiLink, operation: Operation, rank: int) -> None:
        self._link, self._comm, self._operation, self._rank = link, link.comm, operation, rank
        self._kept: list[object] = [operation]

    def start(self) -> MpiWork:
        """Start the collective; return the Work to wait for."""
        requests, outputs = getattr(self, self._operation.kind)(), self._operation.outputs
        averages = op_type(self._operation.reduce_op) == "avg" and len(outputs) > 0
        after = partial(outputs[0].div_, self._comm.Get_size()) if averages else None
        return self._link.work(requests, self._kept, self._operation.timeout, after)

    def _op(self, dtype: torch.dtype) -> Any:
        kind = kind_of(self._operation.reduce_op)
        if self._operation.dtype is torch.bool:
            kind = OF_TRUTH.get(kind, kind)
        name = "SUM" if kind is RedOpType.AVG else kind.name
        if dtype in _SHORT:
            return _own_op(dtype, name.lower())
        return getattr(self._link.mpi, "PROD" if name == "PRODUCT" else name)

    def _number(self, tensor: Tensor) -> list[Any]:
        buffer = self._link.buffer(tensor)
        if tensor.dtype is torch.uint8:  # MPI does not compute with BYTE
            buffer[1] = self._link.mpi.UINT8_T
        return buffer

    def _bytes(self, tensor: Tensor) -> list[Any]:
        return self._link.buffer(as_bytes(tensor))

    def barrier(self) -> list[Any]:
        return [self._comm.Ibarrier()]

    def broadcast(self) -> list[Any]:
        return [
            self._comm.Ibcast(self._bytes(output), self._operation.root)
            for output in self._operation.outputs
        ]

    def all_reduce(self) -> list[Any]:
        source, target = self._operation.inputs[0], self._operation.outputs[0]
        return [
            self._comm.Iallreduce(
                self._unless_in(source, target), self._number(target), self._op(target.dtype)
            )
        ]

    def _unless_in(self, source: Tensor, target: Tensor) -> Any:
        in_place = source.data_ptr() == target.data_ptr()
        return self._link.mpi.IN_PLACE if in_place else self._number(source)

    def reduce(self) -> list[Any]:
        source, root = self._operation.inputs[0], self._operation.root
        sent, received = self._number(source), None
        if self._rank == root:
            target = self._operation.outputs[0]
            sent, received = self._unless_in(source, target), self._number(target)
        return [self._comm.Ireduce(sent, received, self._op(source.dtype), root)]

    def reduce_scatter(self) -> list[Any]:
        inputs, target = self._operation.inputs, self._operation.outputs[0]
        parts = split_parts(inputs, self._comm.Get_size())
        source = inputs.view(-1) if isinstance(inputs, Tensor) else torch.cat(parts)
        if any(part.data_ptr() == target.data_ptr() for part in parts):
            source = source.clone()
        self._kept.append(source)
        return [
            self._comm.Ireduce_scatter_block(
                self._number(source), self._number(target), self._op(source.dtype)
            )
        ]

    def all_gather(self) -> list[Any]:
        source, outputs = self._operation.inputs[0], self._operation.outputs
        parts = split_parts(outputs, self._comm.Get_size())
        if isinstance(outputs, Tensor):
            if source.data_ptr() != parts[self._rank].data_ptr():
                parts[self._rank].copy_(source.view(-1))
            return [self._comm.Iallgather(self._link.mpi.IN_PLACE, self._bytes(outputs))]
        return self._exchange(((rank, source) for rank in range(len(parts))), enumerate(parts))

    def gather(self) -> list[Any]:
        source, root = self._operation.inputs[0], self._operation.root
        coming = split_parts(self._operation.outputs, self._comm.Get_size())
        return self._exchange([(root, source)], enumerate(coming) if self._rank == root else ())

    def scatter(self) -> list[Any]:
        target, root = self._operation.outputs[0], self._operation.root
        leaving = split_parts(self._operation.inputs, self._comm.Get_size())
        return self._exchange(enumerate(leaving) if self._rank == root else (), [(root, target)])

    def all_to_all(self) -> list[Any]:
        size = self._comm.Get_size()
        sources = split_parts(self._operation.inputs, size)
        targets = split_parts(self._operation.outputs, size)
        taken = {target.data_ptr() for target in targets if target.numel()}
        # In place, arriving data would overwrite data that was not sent yet.
        leaving = [source.clone() if source.data_ptr() in taken else source for source in sources]
        return self._exchange(enumerate(leaving), enumerate(targets))

    def _exchange(
        self, leaving: Iterable[tuple[int, Tensor]], coming: Iterable[tuple[int, Tensor]]
    ) -> list[Any]:
        """Begin to send and receive tensors, each with the rank at the other end."""
        sources, targets = dict(leaving), dict(coming)
        own, mine = sources.pop(self._rank, None), targets.pop(self._rank, None)
        if own is not None and mine is not None and own.data_ptr() != mine.data_ptr():
            mine.view(-1).copy_(own.view(-1))
        self._kept += [sources, targets]
        return [
            *(self._comm.Irecv(self._bytes(t), r, 0) for r, t in targets.items() if t.numel()),
            *(self._comm.Isend(self._bytes(s), r, 0) for r, s in sources.items() if s.numel()),
        ]


# -- the engine and its group -----------------------------------------------------------------


class MpiMover(Mover):
    """A communicator for collectives, and another for messages."""

    def __init__(self, request: DistributedBackendOptions) -> None:
        comm = connect(request)
        super().__init__(MpiLink(comm, request.timeout), request, "mpi")
        self._collectives: MpiLink | None = MpiLink(comm.Dup(), request.timeout)

    def call(self, operation: Operation) -> MpiWork:
        assert self._collectives is not None
        return _Requests(self._collectives, operation, self.rank).start()

    def interrupt(self) -> None:
        super().interrupt()
        if self._collectives is not None:
            self._collectives.abort()

    def release(self) -> None:
        if self._collectives is not None:
            self._collectives.close(is_unused=True)
            self.backend.close(is_unused=False)
        self._collectives = None
        super().release()


class MpiGroup(EngineGroup):
    """A process group on mpi4py."""

    def __init__(self, engine: ComparedEngine, request: DistributedBackendOptions) -> None:
        super().__init__(engine, request)
        self.devices = ("cpu",)

    @classmethod
    def reduces(cls, op: AnyReduceOp, dtype: torch.dtype) -> bool:
        kind = kind_of(op)
        if dtype.is_complex:
            return kind in (RedOpType.SUM, RedOpType.AVG)
        return dtype in REAL_DTYPES and kind is not RedOpType.PREMUL_SUM


def create_mpi_group(request: DistributedBackendOptions, options: object) -> ProcessGroup:
    """Make a group on mpi4py. Collective over its ranks."""
    return MpiGroup(compared(MpiMover(request), request), request)
