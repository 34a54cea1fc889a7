"""What the benchmarks measure: implementations of collectives, behind one small interface.

To add one (say, Open MPI through mpi4py): subclass :class:`Peer`, and add it to ``PEERS``.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed
from torch import Tensor

import tilework.distributed

Call = Callable[[], None]


class Peer(ABC):
    """One rank's end of one implementation; each rank of a measurement makes its own.

    All methods are collective. Buffers are float32 on the CPU.

    Args:
        rank: This process's rank.
        ranks: The number of ranks.
        folder: An empty folder that all ranks see, to meet in.
    """

    name: ClassVar[str]

    @abstractmethod
    def __init__(self, rank: int, ranks: int, folder: Path) -> None: ...

    @abstractmethod
    def prepare(self, operation: str, count: int) -> Call:
        """A call that runs ``operation`` once, on buffers that exist already.

        It has been run once, and its result was right. ``count`` is what a table calls the size:
        float32 elements in each rank's input for all_gather, in each rank's output for
        reduce_scatter, in each rank's whole buffer otherwise.
        """

    @abstractmethod
    def agree(self, number: int) -> int:
        """Rank 0's ``number``, on every rank."""

    @abstractmethod
    def close(self) -> None:
        """Leave."""


class TorchLike(Peer):
    """A module with torch.distributed's names."""

    dist: ClassVar[Any]

    def __init__(self, rank: int, ranks: int, folder: Path) -> None:
        self.rank, self.ranks = rank, ranks
        # Newer torch warns at each call by the older name, which would be measured too.
        older = self.dist.all_gather_into_tensor, self.dist.reduce_scatter_tensor
        self.gather = getattr(self.dist, "all_gather_single", older[0])
        self.scatter = getattr(self.dist, "reduce_scatter_single", older[1])

    def prepare(self, operation: str, count: int) -> Call:
        call: Call = getattr(self, f"_{operation}")(count)
        return call

    def agree(self, number: int) -> int:
        message = torch.tensor([number])
        self.dist.broadcast(message, 0)
        return int(message)

    def close(self) -> None:
        self.dist.destroy_process_group()

    def _barrier(self, count: int) -> Call:
        self.dist.barrier()
        return lambda: self.dist.barrier()

    def _all_reduce(self, count: int) -> Call:
        buffer = torch.full((count,), self.rank + 1.0)
        self.dist.all_reduce(buffer)
        self._must_equal(buffer, self.ranks * (self.ranks + 1) / 2, "all_reduce")
        buffer.zero_()  # or it would grow without bound
        return lambda: self.dist.all_reduce(buffer)

    def _broadcast(self, count: int) -> Call:
        buffer = torch.full((count,), self.rank + 1.0)
        self.dist.broadcast(buffer, 0)
        self._must_equal(buffer, 1.0, "broadcast")
        return lambda: self.dist.broadcast(buffer, 0)

    def _all_gather(self, count: int) -> Call:
        source = torch.full((count,), self.rank + 1.0)
        target = torch.empty(count * self.ranks)
        self.gather(target, source)
        for rank, part in enumerate(target.chunk(self.ranks)):
            self._must_equal(part, rank + 1.0, "all_gather")
        return lambda: self.gather(target, source)

    def _reduce_scatter(self, count: int) -> Call:
        source = torch.arange(float(self.ranks)).repeat_interleave(count)
        target = torch.empty(count)
        self.scatter(target, source)
        self._must_equal(target, self.rank * self.ranks, "reduce_scatter")
        return lambda: self.scatter(target, source)

    def _all_to_all(self, count: int) -> Call:
        source = torch.full((count,), self.rank + 1.0)
        target = torch.empty(count)
        self.dist.all_to_all_single(target, source)
        for rank, part in enumerate(target.chunk(self.ranks)):
            self._must_equal(part, rank + 1.0, "all_to_all")
        return lambda: self.dist.all_to_all_single(target, source)

    def _must_equal(self, found: Tensor, expected: float, operation: str) -> None:
        if not bool((found == expected).all()):
            raise ArithmeticError(f"{self.name}: wrong result of {operation} on {len(found)} items")


class Tilework(TorchLike):
    """tilework over shared memory: the default group, which the launcher of the ranks made."""

    name = "tilework"
    dist: ClassVar[Any] = tilework.distributed


class Gloo(TorchLike):
    """torch's own engine for CPUs, over loopback."""

    name = "Gloo"
    dist: ClassVar[Any] = torch.distributed

    def __init__(self, rank: int, ranks: int, folder: Path) -> None:
        super().__init__(rank, ranks, folder)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=ranks
        )


#: The first is compared with all others.
PEERS: tuple[type[Peer], ...] = (Tilework, Gloo)
