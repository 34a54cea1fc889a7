"""Sends, receives and gathers in a captured step, and hooks that count."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilework.distributed as dist
from tests.capture.twins import run_twins
from tilework.capture import capture
from tilework.parallel import DistributedDataParallel
from tilework.parallel.comm_hooks.powersgd import PowerSGDState, powerSGD_hook
from tilework.parallel.sync_batch_norm import SyncBatchNorm
from tilework.testing import run_ranks


def test_sends_and_gathers_are_part_of_the_program() -> None:
    def program(rank: int) -> None:
        def exchange(x: Tensor) -> tuple[Tensor, Tensor]:
            received = torch.empty(3)
            sent: Any = dist.isend(x * 2, 1 - rank)  # both ranks send first
            dist.recv(received, 1 - rank)
            sent.wait()
            gathered = [torch.zeros(3) for _ in range(2)]
            dist.gather(x, gathered if rank == 0 else None, 0)
            return received, gathered[1]

        made = run_twins(lambda: (exchange, dict), [(torch.randn(3),) for _ in range(5)])
        assert len(made.records) == 1

    run_ranks(2, program)


def test_a_collective_writes_to_a_tensor_of_before_the_step() -> None:
    def program(rank: int) -> None:
        def make() -> Any:
            total = torch.full((3,), rank + 1.0)

            def step(x: Tensor) -> Tensor:
                dist.all_reduce(total)
                return total + x

            return step, lambda: {"total": total}

        made = run_twins(make, [(torch.randn(3),) for _ in range(5)])
        assert len(made.records) == 1

    run_ranks(2, program)


def test_a_step_in_a_coalescing_block() -> None:
    def program(rank: int) -> list[float]:
        def step(x: Tensor) -> Tensor:
            total = x + 1
            dist.all_reduce(total)
            return total * 2

        fast, out = capture(step), []
        for _ in range(20):
            time.sleep(0.001 * rank)
            with dist.coalescing_manager() if fast.records else nullcontext():
                out.append(fast(torch.full((1,), float(rank))).item())
        assert len(fast.records) == 1
        return out

    assert run_ranks(2, program, backend="shm") == [[6.0] * 20] * 2


def test_a_hook_that_counts_is_refused_and_synchronised_statistics_are_not() -> None:
    def program(rank: int) -> None:
        def stepping(model: Any) -> Any:
            return capture(lambda x: model(x).sum().backward())

        norm = SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3)))
        fast = stepping(DistributedDataParallel(norm))
        for _ in range(3):
            fast(torch.randn(4, 3))
        model = DistributedDataParallel(nn.Linear(3, 3))
        model.register_comm_hook(PowerSGDState(None), powerSGD_hook)
        fast = stepping(model)
        fast(torch.randn(4, 3))
        fast(torch.randn(4, 3))

    with pytest.raises(Exception, match="powerSGD_hook counts steps"):
        run_ranks(2, program)
