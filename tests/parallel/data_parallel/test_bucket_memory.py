"""Gradients lie in the bucket, once; what the program holds from before is not written again."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilework.distributed as dist
from tests.parallel.data_parallel.models import mse, seeded, train
from tilework.parallel import DistributedDataParallel
from tilework.parallel.data_parallel.bucket_memory import MOVED_BYTES, BucketMemory
from tilework.testing import run_ranks

SIDE = 80
assert SIDE * SIDE * 4 > MOVED_BYTES


def wide() -> nn.Module:
    """A module with large parameters and small ones."""
    return seeded(lambda: nn.Sequential(nn.Linear(8, 600), nn.Tanh(), nn.Linear(600, 8)))


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}])
@pytest.mark.parametrize("megabytes", [0.0005, 25])
def test_training_with_large_gradients(options: dict[str, Any], megabytes: float) -> None:
    tolerance = {"rtol": 1e-4, "atol": 1e-5}
    train(wide(), bucket_cap_mb=megabytes, tolerance=tolerance, **options)


def memory(view: bool = False) -> tuple[BucketMemory, Tensor, Tensor]:
    """A bucket of a large parameter and a small one."""
    large, small = nn.Parameter(torch.zeros(SIDE, SIDE)), nn.Parameter(torch.zeros(3))
    made = BucketMemory([large, small], torch.float32, dist.get_default_group(), view)
    return made, large, small


def give(*parameters: Tensor) -> None:
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)


def one_pass(made: BucketMemory, factor: float = 2.0) -> None:
    """Fill a bucket as a pass does, multiply it in place of a reduction, and hand it out."""
    made.move(0)
    made.fill()
    made.flat.mul_(factor)
    made.hand_out()


def alone(program: Any) -> None:
    run_ranks(1, lambda rank: program())


@pytest.mark.parametrize("view", [False, True])
def test_a_large_gradient_lies_in_the_bucket(view: bool) -> None:
    def program() -> None:
        made, large, small = memory(view)
        made.open()
        give(large, small)
        one_pass(made)
        assert large.grad is not None
        assert small.grad is not None
        assert large.grad.data_ptr() == made.flat.data_ptr()
        assert (small.grad is made.views[1]) == view
        assert large.grad.eq(2).all()
        assert small.grad.eq(2).all()

    alone(program)


def test_a_gradient_that_is_kept_is_not_written_again() -> None:
    def program() -> None:
        made, large, small = memory()
        made.open()
        give(large, small)
        one_pass(made)
        kept = large.grad
        assert kept is not None
        large.grad = None  # as zero_grad() does
        made.open()
        give(large, small)
        one_pass(made, 5.0)
        assert kept.eq(2).all()
        assert large.grad is not None
        assert large.grad.eq(5).all()

    alone(program)


def test_memory_is_used_again_once_gradients_are_gone() -> None:
    def program() -> None:
        made, large, small = memory()
        places = set()
        for _ in range(3):
            made.open()
            give(large, small)
            one_pass(made)
            places.add(made.flat.data_ptr())
            large.grad = None
        assert len(places) == 1

    alone(program)


def test_gradients_that_accumulate_stay_where_they_are() -> None:
    def program() -> None:
        made, large, small = memory()
        made.open()
        give(large, small)
        one_pass(made)
        kept = large.grad
        assert kept is not None
        made.open()
        kept += 1
        one_pass(made)
        assert large.grad is kept
        assert kept.eq(6).all()  # 2 (2 + 1)

    alone(program)


def test_gradients_of_the_program_keep_their_memory() -> None:
    def program() -> None:
        made, large, small = memory()
        give(large, small)
        own = large.grad
        made.open()
        one_pass(made)
        assert large.grad is own
        assert own is not None
        assert own.eq(2).all()

    alone(program)


def test_missing_gradients_are_taken_out_of_the_bucket() -> None:
    def program() -> None:
        made, large, small = memory()
        made.open()
        give(large, small)
        one_pass(made)
        made.open()
        made.fill(missing=[0])
        made.flat.mul_(3.0)
        made.hand_out([False, True])
        assert large.grad is not None
        assert large.grad.eq(2).all()

    alone(program)


def private_bytes() -> int:
    """Bytes of memory that this process has for itself: without the segment, and libraries."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kilobytes,) = [line.split()[1] for line in lines if line.startswith("RssAnon")]
    return int(kilobytes) * 1024


LAYERS, SIZE = 6, 1024


def peak_of_a_step(options: dict[str, Any] | None) -> float:
    """The most memory that a step takes, in the segment or not, in copies of the gradients."""
    mallopt: Any = ctypes.CDLL(None).mallopt
    mallopt(-3, 1 << 16)  # freed memory goes back to the system at once, and is not counted
    torch.set_num_threads(1)
    group: Any = dist.get_default_group()
    before = private_bytes()
    model: Any = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS)))
    peaks: list[int] = []

    def sample(_: object) -> None:
        peaks.append(private_bytes() + group.engine.group.arena().used_bytes() - before)

    for parameter in model.parameters():
        parameter.register_hook(sample)
    wrapped = model if options is None else DistributedDataParallel(model, **options)
    for _ in range(3):
        model.zero_grad()
        peaks.clear()
        x = torch.ones(4, SIZE)
        mse(wrapped(x), x).backward()
        sample(None)
    return max(peaks) / (LAYERS * SIZE * SIZE * 4)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
def test_gradients_take_no_second_copy(options: dict[str, Any]) -> None:
    """Measured: the parameters, the gradients, and one gradient on its way."""

    def program(rank: int) -> float:
        return peak_of_a_step(options)

    assert max(run_ranks(2, program, kind="processes")) < 2 + 1.5 / LAYERS
