"""Tensors that the core is handed: held until it is done with them, and no longer."""

from __future__ import annotations

import time
import weakref

import pytest
import torch

import tilework.distributed as dist
from tilework.testing import run_ranks

pytestmark = pytest.mark.skipif(not dist.is_shm_available(), reason="the core is not built")


def test_a_dropped_operation_lets_its_tensor_go_once_it_is_done() -> None:
    def program(rank: int) -> bool:
        tensor = torch.ones(1000)
        alive = weakref.ref(tensor.untyped_storage())
        dist.all_reduce(tensor, async_op=True)
        del tensor
        deadline = time.monotonic() + 60
        while alive() is not None and time.monotonic() < deadline:
            time.sleep(0.002)
        dist.barrier()
        return alive() is None

    assert run_ranks(2, program, backend="shm") == [True] * 2


def test_what_is_under_way_is_held() -> None:
    def program(rank: int) -> list[float]:
        tensors = [torch.full((50_000,), float(rank)) for _ in range(200)]
        if rank == 1:
            time.sleep(0.1)
        for tensor in tensors[:-1]:
            dist.all_reduce(tensor, async_op=True)
        last = tensors.pop()
        tensors.clear()
        noise = [torch.full((50_000,), 99.0) for _ in range(100)]  # takes memory that was let go
        dist.all_reduce(last)
        assert all(bool((t == 99.0).all()) for t in noise)
        return last[:2].tolist()

    assert run_ranks(2, program, backend="shm") == [[1.0, 1.0]] * 2


def test_a_call_that_is_refused_on_one_rank_leaves_the_group_usable() -> None:
    def program(rank: int) -> float:
        tensor = torch.ones(4)
        if rank == 0:
            outputs = [torch.ones(4), torch.ones(4)]
            with pytest.raises(ValueError, match="own part"):
                dist.get_default_group().allgather([outputs], [torch.ones(3)])
        dist.all_reduce(tensor)
        return tensor.sum().item()

    assert run_ranks(2, program, backend="shm") == [8.0] * 2
