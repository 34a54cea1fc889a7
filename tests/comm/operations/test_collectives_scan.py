"""scan and exscan: what they refuse, and captured."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch import Tensor

import tilework.distributed as dist
from tests.tables import each
from tilework.capture import capture
from tilework.distributed import functional
from tilework.testing import run_ranks

LIMIT = timedelta(seconds=120)
BACKENDS = ("threads", "shm")


@each("backend", BACKENDS)
def test_ranks_that_count_in_different_directions_are_told(backend: str) -> None:
    def program(rank: int) -> None:
        with pytest.raises(dist.CollectiveMismatchError, match="scan"):
            dist.scan(torch.ones(2), reverse=rank == 0)

    run_ranks(2, program, kind="threads", backend=backend, timeout=LIMIT)


@each("backend", BACKENDS)
def test_a_scan_and_an_exscan_are_different_calls(backend: str) -> None:
    def program(rank: int) -> None:
        with pytest.raises(dist.CollectiveMismatchError, match="exscan"):
            (dist.scan, dist.exscan)[rank](torch.ones(2))

    run_ranks(2, program, kind="threads", backend=backend, timeout=LIMIT)


def test_a_mean_is_refused() -> None:
    def program(rank: int) -> None:
        for call in (dist.scan, functional.exscan):
            with pytest.raises(ValueError, match="no AVG"):
                call(torch.ones(2), dist.ReduceOp.AVG)
        dist.barrier()

    run_ranks(2, program)


def test_gradients_of_products_are_refused() -> None:
    def program(rank: int) -> None:
        y = functional.scan(torch.ones(2, requires_grad=True), "product")
        with pytest.raises(NotImplementedError, match="all_gather_tensor"):
            y.sum().backward()  # type: ignore[no-untyped-call]

    run_ranks(2, program)


def test_captured_steps_scan() -> None:
    def program(rank: int) -> list[float]:
        @capture
        def step(x: Tensor) -> Tensor:
            dist.scan(x)
            return functional.exscan(x)

        return [step(torch.tensor([k + rank + 1.0])).item() for k in range(4)]

    assert run_ranks(2, program) == [[0.0] * 4, [1.0, 2.0, 3.0, 4.0]]
