"""Large gradients are averaged where they lie, unless they share memory; others in the bucket."""

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
from tilework.parallel.data_parallel.bucket_memory import ALONE_BYTES, BucketMemory
from tilework.testing import run_ranks

SIDE = 260
assert SIDE * SIDE * 4 > ALONE_BYTES


def wide() -> nn.Module:
    """A module with large parameters and small ones."""
    return seeded(lambda: nn.Sequential(nn.Linear(8, 9000), nn.Tanh(), nn.Linear(9000, 8)))


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
    made.open()
    made.fill()
    for part in made.parts:
        part.mul_(factor)
    made.hand_out()


def alone(program: Any) -> None:
    run_ranks(1, lambda rank: program())


@pytest.mark.parametrize("view", [False, True])
def test_a_large_gradient_is_averaged_where_it_lies(view: bool) -> None:
    def program() -> None:
        made, large, small = memory(view)
        give(large, small)
        own = large.grad, small.grad
        one_pass(made)
        assert large.grad is own[0]
        assert small.grad is (made.views[1] if view else own[1])
        assert made.flat.numel() == small.numel()
        for grad in (large.grad, small.grad):
            assert grad is not None
            assert grad.eq(2).all()

    alone(program)


def test_gradients_in_the_same_memory_are_averaged_apart() -> None:
    def program() -> None:
        first, second = nn.Parameter(torch.zeros(SIDE, SIDE)), nn.Parameter(torch.zeros(SIDE, SIDE))
        made = BucketMemory([first, second], torch.float32, dist.get_default_group(), False)
        (first.view(-1) + second.view(-1)).exp().sum().backward()  # type: ignore[no-untyped-call]
        assert first.grad is not None
        assert second.grad is not None
        assert first.grad.data_ptr() == second.grad.data_ptr()
        one_pass(made)
        assert first.grad.eq(2).all()
        assert second.grad.eq(2).all()

    alone(program)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_gradient_may_lie_otherwise_than_the_parameter(layout: torch.memory_format) -> None:
    def program() -> None:
        large = nn.Parameter(torch.zeros(64, 32, 8, 8))
        made = BucketMemory([large], torch.float32, dist.get_default_group(), False)
        values = torch.arange(large.numel(), dtype=torch.float32).view(large.shape)
        large.grad = values.clone(memory_format=layout)
        one_pass(made)
        assert torch.equal(large.grad, 2 * values)

    alone(program)


@pytest.mark.parametrize("used", [False, True])
def test_a_gradient_of_before_is_written_only_if_some_rank_has_a_new_one(used: bool) -> None:
    def program() -> None:
        made, large, small = memory()
        give(large, small)
        made.open()
        made.fill(missing=[0])
        for part in made.parts:
            part.mul_(3.0)
        made.hand_out([used, True])
        assert large.grad is not None
        assert large.grad.eq(3 if used else 1).all()

    alone(program)


def test_all_gradients_lie_in_the_bucket_for_a_hook() -> None:
    def program() -> None:
        made, large, small = memory()
        give(large, small)
        made.open(whole=True)
        made.fill()
        assert made.flat.eq(1).all()
        assert made.views[0].shape == large.shape
        assert [part is made.flat for part in made.parts] == [True]

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


def test_gradients_of_a_failed_pass_leave_the_memory_of_reductions() -> None:
    def program(rank: int) -> None:
        made, large, small = memory()
        large.grad, small.grad = torch.ones(SIDE, SIDE), torch.ones(3)
        made.open()
        made.fill()
        late = made.parts
        made.withdraw()
        for part in late:
            part.fill_(7.0)
        assert large.grad.eq(1).all()
        assert small.grad.eq(1).all()

    run_ranks(1, program)


def test_a_pass_that_raises_withdraws_at_once() -> None:
    def program(rank: int) -> None:
        ddp: Any = DistributedDataParallel(wide(), bucket_cap_mb=0.0005)
        ddp.module[0].weight.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ddp(torch.ones(2, 8)).sum().backward()
        memories = [bucket.memory for bucket in ddp.reducer.buckets]
        assert not any(each.parts for each in memories)

    run_ranks(2, program)


@pytest.mark.parametrize("numel", [8, ALONE_BYTES])
def test_gradients_that_torch_conjugates_lazily(numel: int) -> None:
    def program(rank: int) -> None:
        layer: Any = nn.Module()
        layer.weight = nn.Parameter(torch.ones(numel, dtype=torch.complex64))
        layer.forward = lambda x: (layer.weight.conj() * x).sum().abs()
        ddp: Any = DistributedDataParallel(layer)
        for _ in range(2):
            ddp.zero_grad(set_to_none=False)
            ddp(torch.full((numel,), 1j * (rank + 1))).backward()
        assert torch.allclose(layer.weight.grad.real, torch.full((numel,), 1.5))

    run_ranks(2, program)
