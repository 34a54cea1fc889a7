"""What the benchmarks measure: implementations of collectives, behind one small interface.

To add another: subclass :class:`Peer`, and add the class to ``PEERS``.
"""

from __future__ import annotations

import importlib
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed
from figures import GLOO, MPIS, TILEWORK, Case, parts
from torch import Tensor

import tilework.distributed

Call = Callable[[], object]
#: Long enough for the slowest call of a loaded machine.
TIMEOUT = timedelta(minutes=2)


class Workload:
    """A case's buffers on one rank, which peers use by turns, and what belongs into them.

    Args:
        case: What is to be run.
        rank: This process's rank.
        ranks: The number of ranks.
        empty: Makes an uninitialised tensor, as torch.empty.
    """

    def __init__(
        self, case: Case, rank: int, ranks: int, empty: Callable[..., Tensor] = torch.empty
    ) -> None:
        self.case, self.rank, self.ranks = case, rank, ranks
        dtype = getattr(torch, "float32" if case.dtype == "-" else case.dtype)
        count = case.bytes // dtype.itemsize
        if case.operation == "all_to_all":  # an equal part for each rank
            count = max(count - count % ranks, ranks)
        whole = count * parts(case.operation, ranks)
        self.source = empty(whole if case.operation == "reduce_scatter" else count, dtype=dtype)
        if case.operation in ("all_reduce", "async_all_reduce", "broadcast"):
            self.target = self.source
        else:
            self.target = empty(whole if case.operation == "all_gather" else count, dtype=dtype)

    def fill(self) -> None:
        """Write the input."""
        self.target.zero_()
        if self.case.operation == "reduce_scatter":
            for rank, part in enumerate(self.source.chunk(self.ranks)):
                part.fill_(rank)
        else:
            self.source.fill_(self.rank + 1)

    def check(self, peer: str) -> None:
        """Raise unless the output is right; then zero it, so that repeated sums do not grow."""
        total, ranks = sum(range(1, self.ranks + 1)), range(1, self.ranks + 1)
        expected = {
            "all_reduce": [total],
            "broadcast": [1],
            "all_gather": ranks,
            "reduce_scatter": [self.rank * self.ranks],
            "all_to_all": ranks,
            "barrier": [],
            "send_recv": [2 - self.rank],
            "exchange": [2 - self.rank],
            "batch": [2 - self.rank],
            "async_all_reduce": [total],
        }[self.case.operation]
        for part, value in zip(self.target.chunk(max(1, len(expected))), expected, strict=False):
            if not bool((part == value).all()):
                raise ArithmeticError(f"{peer}: wrong result of {self.case} on rank {self.rank}")
        self.target.zero_()


class Peer(ABC):
    """One rank's end of one implementation; each rank of a measurement makes its own.

    All methods are collective.

    Args:
        rank: This process's rank.
        ranks: The number of ranks.
        folder: A folder that all ranks see, to meet in.
    """

    @abstractmethod
    def __init__(self, rank: int, ranks: int, folder: Path) -> None: ...

    @abstractmethod
    def prepare(self, work: Workload) -> Call | None:
        """A call that does ``work`` once; None where the peer lacks the operation or the dtype.

        send_recv is there and back, between ranks 0 and 1. broadcast has another root in each call,
        from rank 0 on: a root that need not wait for the others cannot run ahead of them.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave."""


def there_and_back(rank: int, send: Call, receive: Call) -> Call:
    """A message from rank 0 to rank 1 and one back."""
    first, second = (receive, send) if rank else (send, receive)

    def call() -> None:
        first()
        second()

    return call


def wait_for(works: Sequence[Any]) -> None:
    """Wait until they are done."""
    for work in works:
        work.wait()


class TorchLike(Peer):
    """A module with torch.distributed's names."""

    dist: ClassVar[Any]
    backend: ClassVar[str]

    def __init__(self, rank: int, ranks: int, folder: Path) -> None:
        place = f"file://{folder}/{self.backend}"
        self.dist.init_process_group(
            self.backend, init_method=place, rank=rank, world_size=ranks, timeout=TIMEOUT
        )

    def prepare(self, work: Workload) -> Call | None:
        dist, source, target, other = self.dist, work.source, work.target, 1 - work.rank
        # Newer torch warns at each call by the older names, which would be measured too.
        older = dist.all_gather_into_tensor, dist.reduce_scatter_tensor
        gather = getattr(dist, "all_gather_single", older[0])
        scatter = getattr(dist, "reduce_scatter_single", older[1])
        roots = itertools.cycle(range(work.ranks))
        halves: tuple[Call, Call] = (
            lambda: dist.send(source, other),
            lambda: dist.recv(target, other),
        )
        calls: dict[str, Call] = {
            "all_reduce": lambda: dist.all_reduce(target),
            "broadcast": lambda: dist.broadcast(target, next(roots)),
            "all_gather": lambda: gather(target, source),
            "reduce_scatter": lambda: scatter(target, source),
            "all_to_all": lambda: dist.all_to_all_single(target, source),
            "barrier": lambda: dist.barrier(),
            "send_recv": there_and_back(work.rank, *halves),
            "exchange": lambda: wait_for([dist.isend(source, other), dist.irecv(target, other)]),
            "batch": lambda: wait_for(
                dist.batch_isend_irecv(
                    [dist.P2POp(dist.isend, source, other), dist.P2POp(dist.irecv, target, other)]
                )
            ),
            "async_all_reduce": lambda: dist.all_reduce(target, async_op=True).wait(),
        }
        return calls[work.case.operation]

    def close(self) -> None:
        self.dist.destroy_process_group()


class Tilework(TorchLike):
    """tilework over shared memory."""

    dist: ClassVar[Any] = tilework.distributed
    backend = "shm"


class Gloo(TorchLike):
    """torch's own engine for CPUs, over loopback."""

    dist: ClassVar[Any] = torch.distributed
    backend = "gloo"

    def __init__(self, rank: int, ranks: int, folder: Path) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        super().__init__(rank, ranks, folder)

    def prepare(self, work: Workload) -> Call | None:
        call = super().prepare(work)
        try:
            call and call()
        except RuntimeError as error:
            if "scalar type" not in str(error):
                raise
            return None  # an older torch's Gloo lacks dtypes
        return super().prepare(work)  # from root 0 on again


class Mpi(Peer):
    """An MPI through mpi4py's upper-case methods, on NumPy's views of the tensors.

    The ranks must have been started by mpirun. MPI has no bfloat16: it moves it as uint16, and
    cannot reduce it.
    """

    def __init__(self, rank: int, ranks: int, folder: Path) -> None:
        # MPIs take locks if they are told that several threads may call them.
        importlib.import_module("mpi4py").rc.thread_level = "funneled"
        self.mpi: Any = importlib.import_module("mpi4py.MPI")
        self.comm = self.mpi.COMM_WORLD
        if (self.comm.rank, self.comm.size) != (rank, ranks):
            raise RuntimeError(f"mpirun made rank {self.comm.rank} of {self.comm.size} ranks")

    def prepare(self, work: Workload) -> Call | None:
        comm, other = self.comm, 1 - work.rank
        source, target = as_numpy(work.source), as_numpy(work.target)
        roots = itertools.cycle(range(work.ranks))
        halves: tuple[Call, Call] = (
            lambda: comm.Send(source, other),
            lambda: comm.Recv(target, other),
        )

        def exchange() -> None:
            self.mpi.Request.Waitall([comm.Isend(source, other), comm.Irecv(target, other)])

        calls: dict[str, Call] = {
            "all_reduce": lambda: comm.Allreduce(self.mpi.IN_PLACE, target),
            "broadcast": lambda: comm.Bcast(target, next(roots)),
            "all_gather": lambda: comm.Allgather(source, target),
            "reduce_scatter": lambda: comm.Reduce_scatter_block(source, target),
            "all_to_all": lambda: comm.Alltoall(source, target),
            "barrier": lambda: comm.Barrier(),
            "send_recv": there_and_back(work.rank, *halves),
            "exchange": exchange,
            "batch": exchange,
            "async_all_reduce": lambda: comm.Iallreduce(self.mpi.IN_PLACE, target).Wait(),
        }
        if work.case.dtype == "bfloat16":
            for adds in ("all_reduce", "async_all_reduce", "reduce_scatter"):
                del calls[adds]
        return calls.get(work.case.operation)

    def close(self) -> None:
        """Nothing: MPI ends with the process."""


def as_numpy(tensor: Tensor) -> Any:
    """A view of the tensor's memory."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


PEERS: dict[str, type[Peer]] = {TILEWORK: Tilework, GLOO: Gloo, **dict.fromkeys(MPIS, Mpi)}
