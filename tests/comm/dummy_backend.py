"""A backend written in Python by a user: it moves nothing, but leaves traces."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from torch import Tensor

import tilework.distributed as dist


class DummyWork(dist.Work):
    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


class DummyProcessGroup(dist.ProcessGroup):
    def getBackendName(self) -> str:
        return "Dummy"

    def allgather(
        self,
        output_tensor_lists: list[list[Tensor]],
        input_tensor_list: list[Tensor],
        opts: Any = None,
    ) -> dist.Work:
        for outputs, source in zip(output_tensor_lists, input_tensor_list, strict=True):
            for output in outputs:
                output.copy_(source)
        return DummyWork()

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        for tensor in tensors:
            tensor.add_(2)
        return DummyWork()

    def barrier(self, opts: Any = None) -> dist.Work:
        # Rank 0 may keep the store for the others: it leaves last, and nobody waits for it.
        store, key = dist.get_default_store(), "dummy barrier"
        if self.rank() > 0:
            store.add(key, 1)
        while self.rank() == 0 and store.add(key, 0) < self.size() - 1:
            time.sleep(0.001)
        return DummyWork()

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        for tensor in tensors:
            tensor.add_(1)
        return DummyWork()

    def reduce_scatter(
        self,
        output_tensor_list: list[Tensor],
        input_tensor_lists: list[list[Tensor]],
        opts: Any = None,
    ) -> dist.Work:
        for output, inputs in zip(output_tensor_list, input_tensor_lists, strict=True):
            output.copy_(inputs[self.rank()])
        return DummyWork()

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> dist.Work:
        for tensor in tensors:
            tensor.add_(1)
        return DummyWork()

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> dist.Work:
        for tensor in tensors:
            tensor.add_(2)
        return DummyWork()


def create_dummy(
    store: dist.Store, group_rank: int, group_size: int, timeout: timedelta
) -> DummyProcessGroup:
    return DummyProcessGroup(group_rank, group_size)
