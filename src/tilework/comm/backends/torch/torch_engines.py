"""torch's own engines (gloo, nccl, ucc, mpi) behind tilework's contract.

An engine is torch's backend object for one group, meeting through tilework's store. The engine gets
the same input as the native backends' engines: contiguous tensors, one operation at a time. Data
that is only moved goes as bytes, so every dtype can. Operations that an engine lacks are listed on
the class of the group, and raise; nothing is emulated. docs/how-to/many-hosts.md says what Gloo
can do, and why the code around it is as it is.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed
from torch import Tensor

from tilework.comm.backend import Backend, DistributedBackendOptions, is_backend_available
from tilework.comm.backends.hybrid.meeting_engine import EXPLAIN_SECONDS
from tilework.comm.backends.native import NativeGroup
from tilework.comm.backends.network_interfaces import address_towards
from tilework.comm.backends.python_engine import poll
from tilework.comm.backends.torch.compared_engine import ComparedEngine
from tilework.comm.backends.torch.comparing import compared
from tilework.comm.backends.torch.movers import GlooMover, Mover, StreamMover
from tilework.comm.backends.torch.torch_calls import c10d, kind_of
from tilework.comm.capabilities import Capability
from tilework.comm.contract import ProcessGroup, Work
from tilework.comm.elastic.watched_store import while_looking
from tilework.comm.forms import SCANS, Operation, Parts
from tilework.comm.reduce_op import AnyReduceOp, RedOpType
from tilework.errors import DistBackendError, DistError
from tilework.store import store_based_barrier
from tilework.store.torch_bridge import as_torch_store

# -- the groups -----------------------------------------------------------------------------


class EngineGroup(NativeGroup):
    """A process group on one of torch's backends.

    Asynchronous calls for tensors of a device, on an engine that blocks, are done when they return:
    the streams that are current belong to the calling thread, and the engine's thread has others.
    """

    engine: ComparedEngine
    uneven_sizes = False
    holds_copies = True
    authenticated = False
    lacks: ClassVar[frozenset[Capability]] = frozenset(
        {
            *(Capability.UNEVEN_SIZES, Capability.RANK_ORDER, Capability.SAME_BITS),
            *(Capability.NAN, Capability.WIDE_SUMS),
        }
    )

    def __init__(self, engine: ComparedEngine, request: DistributedBackendOptions) -> None:
        super().__init__(engine, request.group_rank, request.group_size, request.timeout)
        self.authenticated = request.store.authenticated
        self.devices = request.devices or tuple(Backend.backend_capability[engine.name])
        self.holds_memory = engine.mover.blocks
        engine.refusal = _refusal_of(weakref.ref(self))

    def close(self) -> None:
        """Leave the group; raise the error of an asynchronous operation that no call has raised.

        Ranks that left before the operation was over are no failure.
        """
        if self.engine.drain():
            poll(lambda: self.unseen_error is not None or self.failure_seen, EXPLAIN_SECONDS)
        self.engine.close()
        error, self.unseen_error = self.unseen_error, None
        if error is None or self.failure_seen:
            return
        left = {self.global_ranks[rank] for rank in self.engine.left_ranks()}
        if not (error.ranks and left.issuperset(error.ranks)):
            raise error

    def refusal(self, operation: Operation) -> str:
        """Why the backend cannot run ``operation``; "" if it can."""
        op, dtype, name = operation.reduce_op, operation.dtype, operation.title or operation.kind
        if op is not None and dtype is not None and not self.reduces(op, dtype):
            why = f"ReduceOp.{kind_of(op)} of {dtype}; convert the tensor"
        elif operation.kind != "all_to_all" and not (
            _even(operation.inputs) and _even(operation.outputs)
        ):
            why = f"{name} of tensors of different sizes; pad them"
        elif operation.kind in SCANS and not self.engine.mover.blocks:
            why = f"{name}; gather the tensors"
        else:
            return ""
        return (
            f"backend {self.name()!r} has no {why}, or use a backend that has it (hybrid, shm and "
            f"threads do)"
        )

    def _start(self, operation: Operation, outputs: list[Tensor]) -> Work:
        operation.is_async = operation.is_async and not self.refusal(operation)
        device = operation.device
        if (
            device is None
            or device.type == "cpu"
            or not (self.engine.mover.blocks and operation.is_async)
        ):
            return super()._start(operation, outputs)
        operation.is_async = False
        work = super()._start(operation, outputs)
        # Another stream may be current where the caller waits.
        torch.get_device_module(device).current_stream(device).synchronize()
        return work


def _refusal_of(group: weakref.ref[EngineGroup]) -> Callable[[Operation], str]:
    def refusal(operation: Operation) -> str:
        found = group()
        return "" if found is None else found.refusal(operation)

    return refusal


def _even(parts: Parts) -> bool:
    return isinstance(parts, Tensor) or len({part.numel() for part in parts}) < 2


class GlooGroup(EngineGroup):
    """A process group on torch's Gloo."""

    _DTYPES = frozenset(
        (
            *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
            *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
        )
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
        """Raise NotImplementedError unless the tensor is on the CPU: Gloo sends no others."""
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
    """Torch's Gloo object for a group, at ``address`` (None: it finds one). Collective; blocks."""
    store, rank, size = as_torch_store(request.store), request.group_rank, request.group_size
    _check_transport()
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


def _check_transport() -> None:
    """Raise DistBackendError if this build of torch has not the transport that Gloo shall use."""
    wanted = os.environ.get("GLOO_DEVICE_TRANSPORT")
    if not wanted:
        return
    try:
        c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")
    except RuntimeError as error:
        if "unsupported gloo device" in str(error):
            raise DistBackendError(
                f"GLOO_DEVICE_TRANSPORT is {wanted}, which Gloo in this build of torch does not "
                f"have: build torch with USE_GLOO_WITH_OPENSSL=1 for TCP_TLS, let "
                f"TILEWORK_LINK=mpi send between hosts, or unset the variable"
            ) from error


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
    name: str, make: _Make, mover: type[Mover], group: type[EngineGroup]
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
        return group(compared(mover(backend, request, name), request), request)

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
    "gloo": _engine("gloo", _make_gloo, GlooMover, GlooGroup),
    "nccl": _engine("nccl", _make_nccl, StreamMover, NcclGroup),
    "ucc": _engine("ucc", _make_ucc, StreamMover, EngineGroup),
    "mpi": _engine("mpi", _make_mpi, GlooMover, EngineGroup),
}
