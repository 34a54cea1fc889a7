"""torch's own engines (gloo, nccl, ucc, mpi) behind tilework's contract.

The engine is torch's backend object for one group, meeting through tilework's store. Options
and reductions are translated on the way in, failures on the way out. What an engine does not
have natively raises; nothing is emulated.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor

from tilework.comm.backend import DistributedBackendOptions, is_backend_available
from tilework.comm.callsite import call_site
from tilework.comm.contract import Options, ProcessGroup, Work
from tilework.comm.reduce_op import AnyReduceOp, RedOpType
from tilework.errors import CollectiveTimeoutError, DistBackendError, PeerLostError
from tilework.store.torch_bridge import as_torch_store

_Result = TypeVar("_Result")
#: torch's engines and their options; absent from builds of torch without them.
_c10d: Any = getattr(torch._C, "_distributed_c10d", None)
_DEFAULTS = Options()
#: Fragments of the engines' messages that tell why they failed.
_TIMED_OUT = ("timed out", "timeout")
_PEER_LOST = ("connection closed", "connection reset", "connection refused", "broken pipe")


class EngineGroup(ProcessGroup):
    """One of torch's backends as a process group."""

    uneven_sizes = False

    def __init__(self, backend: Any, request: DistributedBackendOptions, name: str) -> None:
        super().__init__(request.group_rank, request.group_size)
        self._backend = backend
        self._backend_name = name
        self._timeout = request.timeout
        self._store_authenticated = request.store.authenticated
        self._entered = 0

    def getBackendName(self) -> str:
        return self._backend_name

    @property
    def authenticated(self) -> bool:
        return self._store_authenticated

    def allreduce(self, tensors: list[Tensor], opts: Options | None = None) -> Work:
        torch_opts = self._options(_c10d.AllreduceOptions(), opts)
        return self._collective("all_reduce", self._backend.allreduce, tensors, torch_opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Options | None = None) -> Work:
        torch_opts = self._options(_c10d.AllreduceCoalescedOptions(), opts)
        return self._collective(
            "all_reduce_coalesced", self._backend.allreduce_coalesced, tensors, torch_opts
        )

    def reduce(self, tensors: list[Tensor], opts: Options | None = None) -> Work:
        torch_opts = self._options(_c10d.ReduceOptions(), opts)
        return self._collective("reduce", self._backend.reduce, tensors, torch_opts)

    def broadcast(self, tensors: list[Tensor], opts: Options | None = None) -> Work:
        torch_opts = self._options(_c10d.BroadcastOptions(), opts)
        return self._collective("broadcast", self._backend.broadcast, tensors, torch_opts)

    def allgather(
        self,
        output_tensor_lists: list[list[Tensor]],
        input_tensor_list: list[Tensor],
        opts: Options | None = None,
    ) -> Work:
        torch_opts = self._options(_c10d.AllgatherOptions(), opts)
        return self._collective(
            "all_gather",
            self._backend.allgather,
            output_tensor_lists,
            input_tensor_list,
            torch_opts,
        )

    def allgather_into_tensor(
        self, output: Tensor, input: Tensor, opts: Options | None = None
    ) -> Work:
        torch_opts = self._options(_c10d.AllgatherOptions(), opts)
        return self._collective(
            "all_gather_into_tensor", self._backend._allgather_base, output, input, torch_opts
        )

    def allgather_coalesced(
        self,
        output_tensor_lists: list[list[Tensor]],
        input_tensor_list: list[Tensor],
        opts: Options | None = None,
    ) -> Work:
        torch_opts = self._options(_c10d.AllgatherOptions(), opts)
        return self._collective(
            "all_gather_coalesced",
            self._backend.allgather_coalesced,
            output_tensor_lists,
            input_tensor_list,
            torch_opts,
        )

    def gather(
        self,
        output_tensor_lists: list[list[Tensor]],
        input_tensor_list: list[Tensor],
        opts: Options | None = None,
    ) -> Work:
        torch_opts = self._options(_c10d.GatherOptions(), opts)
        return self._collective(
            "gather", self._backend.gather, output_tensor_lists, input_tensor_list, torch_opts
        )

    def scatter(
        self,
        output_tensor_list: list[Tensor],
        input_tensor_lists: list[list[Tensor]],
        opts: Options | None = None,
    ) -> Work:
        torch_opts = self._options(_c10d.ScatterOptions(), opts)
        return self._collective(
            "scatter", self._backend.scatter, output_tensor_list, input_tensor_lists, torch_opts
        )

    def reduce_scatter(
        self,
        output_tensor_list: list[Tensor],
        input_tensor_lists: list[list[Tensor]],
        opts: Options | None = None,
    ) -> Work:
        torch_opts = self._options(_c10d.ReduceScatterOptions(), opts)
        return self._collective(
            "reduce_scatter",
            self._backend.reduce_scatter,
            output_tensor_list,
            input_tensor_lists,
            torch_opts,
        )

    def reduce_scatter_tensor(
        self, output: Tensor, input: Tensor, opts: Options | None = None
    ) -> Work:
        torch_opts = self._options(_c10d.ReduceScatterOptions(), opts)
        return self._collective(
            "reduce_scatter_tensor", self._backend._reduce_scatter_base, output, input, torch_opts
        )

    def alltoall(
        self,
        output_tensor_list: list[Tensor],
        input_tensor_list: list[Tensor],
        opts: Options | None = None,
    ) -> Work:
        torch_opts = self._options(_c10d.AllToAllOptions(), opts)
        return self._collective(
            "all_to_all", self._backend.alltoall, output_tensor_list, input_tensor_list, torch_opts
        )

    def alltoall_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Options | None = None,
    ) -> Work:
        torch_opts = self._options(_c10d.AllToAllOptions(), opts)
        return self._collective(
            "all_to_all_single",
            self._backend.alltoall_base,
            output,
            input,
            output_split_sizes,
            input_split_sizes,
            torch_opts,
        )

    def barrier(self, opts: Options | None = None) -> Work:
        return self._collective(
            "barrier", self._backend.barrier, self._options(_c10d.BarrierOptions(), opts)
        )

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Work:
        return self._start(
            f"send to rank {self.global_ranks[dst]}", self._backend.send, tensors, dst, tag
        )

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Work:
        title = f"recv from rank {self.global_ranks[src]}"
        return self._start(title, self._backend.recv, tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        return self._start("recv from any rank", self._backend.recv_anysource, tensors, tag)

    def get_sequence_number_for_group(self) -> int:
        return self._entered

    def abort(self, reason: str = "abort() was called") -> None:
        self._backend.abort()

    def close(self) -> None:
        backend, self._backend = self._backend, _Closed(self)
        if not isinstance(backend, _Closed) and hasattr(backend, "shutdown"):
            backend.shutdown()

    def _options(self, torch_opts: Any, opts: Options | None) -> Any:
        opts = opts or _DEFAULTS
        if hasattr(torch_opts, "reduceOp"):
            torch_opts.reduceOp = _torch_reduce_op(opts.reduceOp)
        if hasattr(torch_opts, "rootRank"):
            torch_opts.rootRank = opts.rootRank
        torch_opts.timeout = self._timeout if opts.timeout is None else opts.timeout
        if hasattr(torch_opts, "asyncOp"):
            torch_opts.asyncOp = opts.asyncOp
        return torch_opts

    def _collective(self, title: str, run: Callable[..., Any], *args: Any) -> Work:
        self._entered += 1
        return self._start(title, run, *args)

    def _start(self, title: str, run: Callable[..., Any], *args: Any) -> Work:
        title = f"{title} #{self._entered}"
        return EngineWork(self, title, self.guard(title, run, *args))

    def guard(self, title: str, run: Callable[..., _Result], *args: Any) -> _Result:
        """Call into the engine, with its failures as tilework's errors."""
        try:
            return run(*args)
        except ValueError:
            raise
        except RuntimeError as error:
            raise self._translated(title, error) from error

    def _translated(self, title: str, error: RuntimeError) -> Exception:
        first_line = str(error).strip().partition("\n")[0]
        text = (
            f"rank {self.global_ranks[self._rank]}, group {self.group_name!r}: {title} at "
            f"{call_site()}: {self._backend_name}: {first_line}"
        )
        lower = first_line.lower()
        if any(words in lower for words in _TIMED_OUT):
            return CollectiveTimeoutError(text)
        if any(words in lower for words in _PEER_LOST):
            return PeerLostError(text)
        if "not implemented" in lower or "does not support" in lower or "unsupported" in lower:
            return NotImplementedError(f"{text} (the engine lacks it; shm and threads have it)")
        return DistBackendError(text)


class _Closed:
    """Stands for the backend of a closed group."""

    def __init__(self, group: EngineGroup) -> None:
        self._text = f"{group!r} was closed"

    def __getattr__(self, name: str) -> Any:
        raise DistBackendError(self._text)


class EngineWork(Work):
    """torch's Work as ours."""

    def __init__(self, group: EngineGroup, title: str, work: Any) -> None:
        self._group = group
        self._title = title
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> bool:
        args = () if timeout is None else (timeout,)
        self._group.guard(self._title, self._work.wait, *args)
        return True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def exception(self) -> BaseException | None:
        if not self.is_completed() or self._work.is_success():
            return None
        try:
            self.wait()
        except DistBackendError as error:
            return error
        return None

    def result(self) -> list[Tensor]:
        return list(self._work.result())

    def source_rank(self) -> int:
        self.wait()
        return self._group.global_ranks[int(self._work._source_rank())]

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = self._work.get_future()
        return future


def _torch_reduce_op(op: AnyReduceOp) -> Any:
    if not isinstance(op, RedOpType) and op.type is RedOpType.PREMUL_SUM:
        return _c10d._make_nccl_premul_sum(op.factor)
    return getattr(_c10d.ReduceOp, op.name if isinstance(op, RedOpType) else op.type.name)


def _check_available(name: str) -> None:
    if not is_backend_available(name):
        raise DistBackendError(
            f"backend {name!r} is not part of this torch ({torch.__version__}); install a torch "
            f"that has it, or use 'shm' for ranks of one host"
        )


def _engine(name: str, make: Callable[[Any, DistributedBackendOptions, Any], Any]) -> Any:
    def create(request: DistributedBackendOptions, options: Any) -> EngineGroup:
        _check_available(name)
        store = as_torch_store(request.store)
        try:
            backend = make(store, request, options)
        except RuntimeError as error:
            raise DistBackendError(
                f"{name} could not make group {request.group_id!r}: {error}"
            ) from error
        return EngineGroup(backend, request, name)

    create.__doc__ = f"Make a group on torch's {name}. Collective over its ranks."
    return create


def _make_gloo(store: Any, request: DistributedBackendOptions, options: Any) -> Any:
    return _c10d.ProcessGroupGloo(store, request.group_rank, request.group_size, request.timeout)


def _make_nccl(store: Any, request: DistributedBackendOptions, options: Any) -> Any:
    options = options or _c10d.ProcessGroupNCCL.Options()
    options._timeout = request.timeout
    return _c10d.ProcessGroupNCCL(store, request.group_rank, request.group_size, options)


def _make_ucc(store: Any, request: DistributedBackendOptions, options: Any) -> Any:
    return _c10d.ProcessGroupUCC(store, request.group_rank, request.group_size, request.timeout)


def _make_mpi(store: Any, request: DistributedBackendOptions, options: Any) -> Any:
    return _c10d.ProcessGroupMPI.create(list(request.global_ranks_in_group))


ENGINES: dict[str, Callable[[DistributedBackendOptions, Any], ProcessGroup]] = {
    "gloo": _engine("gloo", _make_gloo),
    "nccl": _engine("nccl", _make_nccl),
    "ucc": _engine("ucc", _make_ucc),
    "mpi": _engine("mpi", _make_mpi),
}
