"""torch's own engines (gloo, nccl, ucc, mpi) behind tilework's contract.

An engine is torch's backend object for one group, meeting through tilework's store. The engine gets
the same input as the native backends' engines: contiguous tensors, one operation at a time. Data
that is only moved goes as bytes, so every dtype can. Operations that an engine lacks are listed on
the class of the group, and raise; nothing is emulated. docs/how-to/many-hosts.md says what Gloo
can do, and why the code around it is as it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed
from torch import Tensor

from tilework.comm import provenance_digest
from tilework.comm.backend import Backend, DistributedBackendOptions, is_backend_available
from tilework.comm.backends.completion import TorchCompletion
from tilework.comm.backends.engine_protocol import Abort, Fault, FaultArgs, FaultKind
from tilework.comm.backends.native import NativeGroup
from tilework.comm.backends.network_interfaces import address_towards
from tilework.comm.backends.operation_header import disagreement, header_of
from tilework.comm.backends.python_engine import PythonEngine, poll
from tilework.comm.backends.tensor_memory import as_bytes
from tilework.comm.backends.threads.threads_collectives import scan_gathered, scan_source
from tilework.comm.backends.torch.torch_calls import CALLS, c10d, kind_of
from tilework.comm.capabilities import Capability
from tilework.comm.contract import ProcessGroup, Work
from tilework.comm.elastic.watched_store import while_looking
from tilework.comm.forms import SCANS, Operation, Parts
from tilework.comm.reduce_op import AnyReduceOp, RedOpType
from tilework.errors import DistBackendError, DistError
from tilework.store import Store, store_based_barrier
from tilework.store.torch_bridge import as_torch_store

#: Seconds that a failing rank waits for the others' reports.
_ASK_SECONDS = 0.3
#: The same after connections closed: the rank that closed them may still collect reports.
_LOST_SECONDS = 0.7


class FailureLog:
    """Writes a rank's failures to the group's store, and reads those of other ranks. If the store
    fails, methods write and find nothing, and do not raise.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size

    def report_failure(self, text: str) -> None:
        """Publish ``text``, the reason of this rank's failure, to the other ranks."""
        self._set(f"failures/{self._rank}", text)

    def failure_reports(self, timeout: float) -> list[str | None]:
        """The text that each rank has passed to :meth:`report_failure`; None for ranks that have
        passed none within ``timeout`` seconds.
        """
        keys = [f"failures/{rank}" for rank in range(self._size)]
        poll(lambda: self._check(*keys), timeout)
        return [self._get(key) for key in keys]

    def record_abort(self, kind: str, text: str) -> None:
        """Write that this rank aborts the group, and why; do nothing if another rank has written so
        before.
        """
        try:
            self._store.compare_set("abort", "", f"{self._rank} {kind} {text}")
        except DistError:
            return

    def aborted(self) -> Abort | None:
        """The first abort of the group that a rank has recorded; None if there was none."""
        record = self._get("abort") if self._check("abort") else None
        if record is None:
            return None
        rank, kind, text = record.split(" ", 2)
        return int(rank), kind, text

    def diagnose(self, late: bool) -> tuple[FaultKind, tuple[int, ...]]:
        """Report this rank's failure to the other ranks, wait briefly for them, and find the kind
        of fault and the ranks at fault.

        If a rank has aborted the group, the kind is "aborted". Otherwise the ranks at fault are
        those that have not reported a failure, too.

        Args:
            late: True if this rank waited too long; False if it lost connections.
        """
        self._set(f"failed/{self._rank}", "1")
        keys = {f"failed/{rank}": rank for rank in range(self._size)}
        poll(
            lambda: self._check("abort") or (late and self._check(*keys)),
            _ASK_SECONDS if late else _LOST_SECONDS,
        )
        if self._check("abort"):
            return "aborted", ()
        silent = tuple(rank for key, rank in keys.items() if not self._check(key))
        return ("timeout" if late else "peer_lost"), silent

    def _set(self, key: str, text: str) -> None:
        try:
            self._store.set(key, text)
        except DistError:
            return

    def _check(self, *keys: str) -> bool:
        try:
            return self._store.check(keys)
        except DistError:
            return False

    def _get(self, key: str) -> str | None:
        try:
            return self._store.get(key).decode() if self._check(key) else None
        except DistError:
            return None


#: Words in error messages: of a late rank, and of closed connections.
_LATE = ("timed out",)
_LOST = ("connection closed", "connection reset", "broken pipe", "pair closure", "aborted")
#: A tag that no message ever has.
_NEVER_SENT = 0x7FFF_FFFE

# -- the engine -----------------------------------------------------------------------------


class TorchEngine(PythonEngine):
    """A rank's end of a group on a backend of torch."""

    #: True if an operation ends on a thread that waits, False if on a device's streams.
    blocks = True
    #: True if the engine can exchange headers, which are a few numbers in the host's memory.
    compares = True

    def __init__(self, backend: Any, request: DistributedBackendOptions, name: str) -> None:
        super().__init__(request.group_rank, request.global_ranks_in_group)
        self.name = name
        self._backend = backend
        self._failures = FailureLog(request.store, self.rank, self.size)

    def perform(self, operation: Operation) -> None:
        if (operation.provenance or operation.compared) and self.compares:
            self._meet(operation)
        if operation.kind not in SCANS:
            self.blocking(lambda: self.call(operation).wait())
            return
        source = scan_source(operation)
        gathered = source.new_empty((self.size, source.numel()))
        gather = Operation("all_gather", [source], gathered, timeout=operation.timeout)
        self.blocking(lambda: self.call(gather).wait())
        scan_gathered(operation, self.rank, gathered)

    def call(self, operation: Operation) -> Any:
        """Begin an operation; return torch's Work, or an object with the same interface."""
        return CALLS[operation.kind](self._backend, operation, self.rank)

    def _meet(self, operation: Operation) -> None:
        """Compare headers with all ranks, in groups of meshes; raise Fault if they differ."""
        header = torch.tensor(header_of(operation, self.rank, self.size), dtype=torch.int64)
        headers = torch.empty((self.size, len(header)), dtype=torch.int64)
        gather = Operation("all_gather", [header], headers, timeout=operation.timeout)
        self.blocking(lambda: self.call(gather).wait())
        at_fault, why = disagreement(headers.tolist())
        if at_fault:
            raise Fault("mismatch", at_fault, why)

    def _run(self, act: Callable[[], object]) -> FaultArgs | None:
        return self.fault_of(lambda: self.blocking(act))

    def blocking(self, act: Callable[[], object]) -> None:
        """Run ``act``, a call into torch's backend; raise a fault if it fails."""
        try:
            act()
        except RuntimeError as error:
            raise self._fault(error) from error

    def _fault(self, error: RuntimeError) -> Exception:
        """Turn an error of torch's backend into the exception to raise. Asks the other ranks what
        happened, which takes a moment.
        """
        if self.closed:
            return Fault("closed", (self.rank,), "")
        detail, text = _detail(str(error)), str(error).lower()
        if not any(words in text for words in (*_LATE, *_LOST)):
            return DistBackendError(f"{self.name}: {detail}")
        kind, silent = self._failures.diagnose(late=any(words in text for words in _LATE))
        recorded = self._failures.aborted() if kind == "aborted" else None
        if recorded is not None and self.note_abort(*recorded):
            # Another rank may wait for this rank, which has left the group like an aborting rank.
            self.interrupt()
        abortion = self.aborted()
        if abortion is not None:
            return Fault("aborted", (abortion[0],), abortion[2])
        return Fault(kind, silent, f"{self.name}: {detail}")

    def isend(
        self, tensor: Tensor, dst: int, tag: int, timeout: float, label: int = 0
    ) -> TorchCompletion:
        self.check_open()
        source = as_bytes(tensor)
        return self._message(lambda: self._backend.send([source], dst, tag), source, timeout)

    def irecv(
        self, tensor: Tensor, src: int, tag: int, timeout: float, label: int = 0
    ) -> TorchCompletion:
        self.check_open()
        target = as_bytes(tensor)
        if src < 0:
            return self._message(
                lambda: self._backend.recv_anysource([target], tag), target, timeout
            )
        return self._message(lambda: self._backend.recv([target], src, tag), target, timeout)

    def _message(self, start: Callable[[], Any], memory: Tensor, timeout: float) -> TorchCompletion:
        try:
            return TorchCompletion(start(), memory, timeout, self._run)
        except RuntimeError as error:
            raise self._fault(error) from error

    def blocked(self) -> Sequence[tuple[int, int, str]]:
        return ()  # unknown to torch's engines

    def waiting(self) -> None:
        """None: torch's engines do not know which ranks have come."""

    def departed(self) -> Sequence[int]:
        return ()  # torch's engines do not know

    def last_entered(self) -> list[str]:
        return ["an operation of which it reported nothing"] * self.size

    def report_failure(self, text: str) -> None:
        self._failures.report_failure(text)

    def failure_reports(self, timeout: float) -> list[str | None]:
        return self._failures.failure_reports(timeout)

    def announce_abort(self, kind: str, text: str) -> None:
        self._failures.record_abort(kind, text)

    def interrupt(self) -> None:
        if self._backend is not None:
            end_connections(self._backend, self.rank, self.size)

    def release(self) -> None:
        self._backend = None


def _detail(text: str) -> str:
    """The words of an engine's error that help a person: without places in C++. Adds a remedy to a
    known error.
    """
    said = text.strip().partition("\n")[0].rpartition("] ")[2]
    cause = re.search(r"Last error:\s*(\S.*)", text)  # NCCL's own words, at the end of torch's
    if cause is not None:
        said = f"{cause[1]} ({said})"
    if "Duplicate GPU" in text:
        said += (
            ". NCCL needs a GPU for each rank: start no more ranks than GPUs on a host, and call "
            "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) first. Ranks can share a GPU "
            "with backend='cpu:shm,cuda:gloo'"
        )
    return said


def end_connections(backend: Any, rank: int, size: int) -> None:
    """Make every wait on a Gloo object fail, here and at the other ends.

    Gloo's abort() ends nothing. The only way is a wait that times out, which closes all
    connections.
    """
    for peer in (other for other in range(size) if other != rank):
        nothing = torch.empty(1, dtype=torch.uint8)
        try:
            backend.recv([nothing], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            # A wait on a closed connection fails without closing the other connections.
            if "timed out" in str(error).lower():
                return


class StreamEngine(TorchEngine):
    """An engine whose operations run on a device's streams: no operation blocks a thread."""

    blocks = False
    compares = False  # reading headers would wait for the device

    def submit(self, operation: Operation) -> TorchCompletion:
        self.check_open()
        self._entered += 1
        return TorchCompletion(self.call(operation), operation, operation.timeout, self._run)

    def interrupt(self) -> None:
        if self._backend is not None:
            self._backend.abort()

    def release(self) -> None:
        """End the communicators, whose threads would outlive the group."""
        backend = self._backend
        super().release()
        if backend is not None:
            backend.shutdown()


# -- the groups -----------------------------------------------------------------------------


class EngineGroup(NativeGroup):
    """A process group on one of torch's backends.

    Asynchronous calls for tensors of a device, on an engine that blocks, are done when they return:
    the streams that are current belong to the calling thread, and the engine's thread has others.
    """

    uneven_sizes = False
    holds_copies = True
    lacks: ClassVar[frozenset[Capability]] = frozenset(Capability)

    def __init__(self, engine: TorchEngine, request: DistributedBackendOptions) -> None:
        super().__init__(engine, request.group_rank, request.group_size, request.timeout)
        self._authenticated = request.store.authenticated
        self.devices = request.devices or tuple(Backend.backend_capability[engine.name])
        self._engine_blocks = engine.blocks

    @property
    def authenticated(self) -> bool:
        return self._authenticated

    def _start(self, operation: Operation, outputs: list[Tensor]) -> Work:
        op, dtype = operation.reduce_op, operation.dtype
        if op is not None and dtype is not None and not self.reduces(op, dtype):
            raise NotImplementedError(
                f"backend {self.name()!r} has no ReduceOp.{kind_of(op)} of {dtype}; convert the "
                f"tensor, or use a backend that has it (hybrid, shm and threads do)"
            )
        if operation.kind != "all_to_all" and not (
            _even(operation.inputs) and _even(operation.outputs)
        ):
            raise NotImplementedError(
                f"backend {self.name()!r} has no {operation.title or operation.kind} of tensors "
                f"of different sizes; pad them, or use a backend that has it (hybrid, shm and "
                f"threads do)"
            )
        if operation.kind in SCANS and not self._engine_blocks:
            raise NotImplementedError(
                f"backend {self.name()!r} has no {operation.kind}; gather the tensors, or use a "
                f"backend that has it (gloo, hybrid, shm and threads do)"
            )
        operation.compared = self.of_mesh and not provenance_digest.is_off()
        device = operation.device
        if (
            device is None
            or device.type == "cpu"
            or not (self._engine_blocks and operation.is_async)
        ):
            return super()._start(operation, outputs)
        operation.is_async = False
        work = super()._start(operation, outputs)
        # Another stream may be current where the caller waits.
        torch.get_device_module(device).current_stream(device).synchronize()
        return work


def _even(parts: Parts) -> bool:
    return isinstance(parts, Tensor) or len({part.numel() for part in parts}) < 2


class GlooGroup(EngineGroup):
    """A process group on torch's Gloo."""

    lacks: ClassVar[frozenset[Capability]] = EngineGroup.lacks - {Capability.PROVENANCE}

    _DTYPES = frozenset(
        getattr(torch, name)
        for name in [
            "float64",
            "float32",
            "float16",
            "bfloat16",
            "int64",
            "int32",
            "int8",
            "uint8",
            "bool",
        ]
    )

    @classmethod
    def reduces(cls, op: AnyReduceOp, dtype: torch.dtype) -> bool:
        kind = kind_of(op)
        if dtype.is_complex:
            return kind in (RedOpType.SUM, RedOpType.AVG)
        return dtype in cls._DTYPES and kind is not RedOpType.PREMUL_SUM

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Work:
        self._check_message("send", tensors)
        return super().send(tensors, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Work:
        self._check_message("recv", tensors)
        return super().recv(tensors, src, tag)

    def _check_message(self, name: str, tensors: list[Tensor]) -> None:
        """Raise NotImplementedError unless the tensor is a CPU tensor: Gloo sends no messages from
        other devices.
        """
        device = tensors[0].device
        if device.type != "cpu":
            raise NotImplementedError(
                f"backend {self.name()!r} has no {name} of {device.type} tensors, got one on "
                f"{device}: messages take CPU tensors. Pass tensor.cpu(), or make the group with "
                f"an engine that has it, like backend='cpu:shm,{device.type}:nccl'"
            )


class NcclGroup(EngineGroup):
    """A process group on torch's NCCL."""

    _BITWISE = frozenset({RedOpType.BAND, RedOpType.BOR, RedOpType.BXOR})
    _NOT_REDUCED = frozenset({torch.int16, torch.uint16, torch.uint32, torch.uint64})

    @classmethod
    def reduces(cls, op: AnyReduceOp, dtype: torch.dtype) -> bool:
        kind = kind_of(op)
        if dtype.is_complex:
            return kind in (RedOpType.SUM, RedOpType.AVG, RedOpType.PREMUL_SUM)
        return dtype not in cls._NOT_REDUCED and kind not in cls._BITWISE


# -- making them ----------------------------------------------------------------------------


def make_gloo_backend(request: DistributedBackendOptions, address: str | None) -> Any:
    """Torch's Gloo object for a group. Collective over its ranks; blocks until all are connected.

    Args:
        request: The group.
        address: This host's address to listen at; None: Gloo finds an address.
    """
    store, rank, size = as_torch_store(request.store), request.group_rank, request.group_size
    if address is None or os.environ.get("GLOO_SOCKET_IFNAME"):
        options = request.timeout
    else:
        options = c10d.ProcessGroupGloo._Options()
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=address)]
        options._timeout = request.timeout
    gloo = while_looking(lambda: c10d.ProcessGroupGloo(store, rank, size, options), request.store)
    # Gloo cannot connect to a rank that has left, as a rank may that only sends a message.
    store_based_barrier(rank, request.store, "connected", size, request.timeout)
    return gloo


def _make_gloo(request: DistributedBackendOptions, options: Any) -> Any:
    return make_gloo_backend(request, address_towards(request.store))


def _make_nccl(request: DistributedBackendOptions, options: Any) -> Any:
    options = options or c10d.ProcessGroupNCCL.Options()
    options._timeout = request.timeout
    store = as_torch_store(request.store)
    return c10d.ProcessGroupNCCL(store, request.group_rank, request.group_size, options)


def _make_ucc(request: DistributedBackendOptions, options: Any) -> Any:
    store = as_torch_store(request.store)
    return c10d.ProcessGroupUCC(store, request.group_rank, request.group_size, request.timeout)


def _make_mpi(request: DistributedBackendOptions, options: Any) -> Any:
    return c10d.ProcessGroupMPI.create(list(request.global_ranks_in_group))


_Make = Callable[[DistributedBackendOptions, Any], Any]


def _engine(
    name: str, make: _Make, engine: type[TorchEngine], group: type[EngineGroup]
) -> Callable[[DistributedBackendOptions, Any], ProcessGroup]:
    def create(request: DistributedBackendOptions, options: Any) -> EngineGroup:
        check_available(name)
        try:
            backend = make(request, options)
        except DistError:
            raise
        except RuntimeError as error:
            raise DistBackendError(
                f"{name} could not make group {request.group_id!r}: {error}"
            ) from error
        return group(engine(backend, request, name), request)

    create.__doc__ = f"Make a group on torch's {name}. Collective over its ranks."
    return create


def check_available(name: str) -> None:
    """Raise DistBackendError unless this torch has the engine ``name``."""
    if not is_backend_available(name):
        raise DistBackendError(
            f"backend {name!r} is not part of this torch ({torch.__version__}); install a torch "
            f"that has it, or use 'shm' for ranks of one host"
        )


ENGINES: dict[str, Callable[[DistributedBackendOptions, Any], ProcessGroup]] = {
    "gloo": _engine("gloo", _make_gloo, TorchEngine, GlooGroup),
    "nccl": _engine("nccl", _make_nccl, StreamEngine, NcclGroup),
    "ucc": _engine("ucc", _make_ucc, StreamEngine, EngineGroup),
    "mpi": _engine("mpi", _make_mpi, TorchEngine, EngineGroup),
}
