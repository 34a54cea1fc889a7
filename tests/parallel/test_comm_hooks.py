"""Communication hooks: what they are given, and what comes of their results."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilework.distributed as dist
from tests.parallel.data_parallel.models import ROWS, batch, mlp, mse
from tests.rounding import assert_close
from tilework.parallel import DistributedDataParallel, GradBucket, comm_hooks
from tilework.testing import run_ranks

AnyFuture = torch.futures.Future[Any]


class AddOwn(nn.Module):
    """A parameter to which the input is added."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.ones(2, 2))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return self.p + (x + rank)


def done(value: Any) -> AnyFuture:
    future: AnyFuture = torch.futures.Future()
    future.set_result(value)
    return future


@pytest.mark.parametrize("view", [False, True])
def test_a_result_takes_the_place_of_the_gradients(view: bool) -> None:
    def hook(state: object, bucket: GradBucket) -> AnyFuture:
        ones = done(torch.ones_like(bucket.buffer()))
        return ones.then(lambda future: future.value() + torch.ones_like(future.value()))

    def program(rank: int) -> list[list[float]]:
        ddp: Any = DistributedDataParallel(AddOwn(), gradient_as_bucket_view=view)
        ddp.register_comm_hook(None, hook)
        ddp(torch.ones(2, 2), rank).mean().backward()
        grad: list[list[float]] = ddp.module.p.grad.tolist()
        return grad

    assert run_ranks(2, program) == [[[2.0] * 2] * 2] * 2


def test_a_bucket_tells_what_is_in_it() -> None:
    def program(rank: int) -> list[tuple[int, int, list[tuple[int, ...]], bool]]:
        seen = []

        def hook(state: dict[str, int], bucket: GradBucket) -> AnyFuture:
            shapes = [tuple(gradient.shape) for gradient in bucket.gradients()]
            assert [tuple(p.shape) for p in bucket.parameters()] == shapes
            assert bucket.gradients()[0].data_ptr() == bucket.buffer().data_ptr()
            seen.append((bucket.index(), bucket.buffer().numel(), shapes, bucket.is_last()))
            state["calls"] += 1
            return comm_hooks.allreduce_hook(None, bucket)

        state = {"calls": 0}
        ddp: Any = DistributedDataParallel(mlp(), bucket_cap_mb=0.0003)
        ddp.register_comm_hook(state, hook)
        ddp(batch(1)[0]).sum().backward()
        assert state["calls"] == len(seen)
        return seen

    seen = run_ranks(2, program)[0]
    assert [each[0] for each in seen] == list(range(len(seen)))
    assert [each[3] for each in seen] == [False] * (len(seen) - 1) + [True]
    assert sum(each[1] for each in seen) == sum(p.numel() for p in mlp().parameters())


def test_a_buffer_may_be_replaced() -> None:
    bucket = GradBucket(0, torch.ones(4), [torch.ones(4)], [torch.ones(4)], True)
    bucket.set_buffer(torch.zeros(4))
    assert not bucket.buffer().any()
    assert repr(bucket) == "GradBucket(index=0, 1 gradients, 16 bytes, is_last=True)"
    with pytest.raises(ValueError, match="a bucket of 4 elements cannot have a buffer of 3"):
        bucket.set_buffer(torch.zeros(3))


@pytest.mark.parametrize(
    ("hook", "error", "message"),
    [
        (lambda state, bucket: 5, TypeError, "returns a torch.futures.Future .* got int"),
        (lambda state, bucket: done(torch.ones(1)), TypeError, "elements, got 1 elements"),
        (lambda state, bucket: done("text"), TypeError, "elements, got str"),
    ],
)
def test_results_that_cannot_be(hook: Any, error: type[Exception], message: str) -> None:
    def program(rank: int) -> None:
        ddp: Any = DistributedDataParallel(mlp())
        ddp.register_comm_hook(None, hook)
        ddp(batch(1)[0]).sum().backward()

    with pytest.raises(error, match=message):
        run_ranks(2, program)


def test_there_is_one_hook() -> None:
    def program(rank: int) -> None:
        ddp: Any = DistributedDataParallel(mlp())
        with pytest.raises(TypeError, match="Communication hook must be callable"):
            ddp.register_comm_hook(None, 5)
        ddp.register_comm_hook(None, comm_hooks.noop_hook)
        with pytest.raises(RuntimeError, match="can only be called once"):
            ddp.register_comm_hook(None, comm_hooks.noop_hook)

    run_ranks(1, program)


HALF = {"rtol": 1e-2, "atol": 1e-2}


@pytest.mark.parametrize(
    ("hook", "tolerance"),
    [
        (comm_hooks.allreduce_hook, {}),
        (comm_hooks.fp16_compress_hook, HALF),
        (comm_hooks.bf16_compress_hook, HALF),
        (comm_hooks.fp16_compress_wrapper(comm_hooks.allreduce_hook), HALF),
        (comm_hooks.bf16_compress_wrapper(comm_hooks.allreduce_hook), HALF),
        (comm_hooks.quantization_pertensor_hook, HALF),
        (comm_hooks.quantization_perchannel_hook, HALF),
    ],
)
@pytest.mark.parametrize("view", [False, True])
def test_averages(hook: comm_hooks.CommHook, tolerance: dict[str, Any], view: bool) -> None:
    model: Any = mlp()

    def program(rank: int) -> None:
        plain: Any = copy.deepcopy(model)
        ddp: Any = DistributedDataParallel(
            copy.deepcopy(model), bucket_cap_mb=0.0005, gradient_as_bucket_view=view
        )
        ddp.register_comm_hook(None, hook)
        own = slice(rank * ROWS, (rank + 1) * ROWS)
        for step in range(3):
            x, y = batch(3, step)
            plain.zero_grad()
            ddp.zero_grad()
            mse(plain(x), y).backward()
            mse(ddp(x[own]), y[own]).backward()
            for a, b in zip(ddp.parameters(), plain.parameters(), strict=True):
                assert_close(a.grad, b.grad, **(tolerance or {}))

    run_ranks(3, program)


def test_ranks_get_the_same_bits_from_every_hook() -> None:
    hooks = [
        comm_hooks.fp16_compress_hook,
        comm_hooks.quantization_pertensor_hook,
        comm_hooks.fp16_compress_wrapper(comm_hooks.powerSGD_hook),
    ]

    def program(rank: int) -> list[Tensor]:
        grads = []
        for hook in hooks:
            ddp: Any = DistributedDataParallel(mlp())
            state = comm_hooks.PowerSGDState(None, start_powerSGD_iter=2)
            ddp.register_comm_hook(state if hook is hooks[2] else None, hook)
            for step in range(4):
                ddp.zero_grad()
                ddp(batch(2, step)[0][rank::2]).square().sum().backward()
            grads += [p.grad.clone() for p in ddp.parameters()]
        return grads

    first, second = run_ranks(2, program)
    assert all(map(torch.equal, first, second))


def test_without_communication() -> None:
    def program(rank: int) -> float:
        ddp: Any = DistributedDataParallel(AddOwn())
        ddp.register_comm_hook(None, comm_hooks.noop_hook)
        (ddp(torch.ones(2, 2), 0) * rank).sum().backward()
        grad: float = ddp.module.p.grad[0, 0].item()
        return grad

    assert run_ranks(2, program) == [0.0, 1.0]


def test_local_gradients_after_some_steps() -> None:
    def program(rank: int) -> list[float]:
        pair, _ = dist.new_subgroups(group_size=2)
        state = comm_hooks.PostLocalSGDState(None, pair, start_localSGD_iter=1)
        ddp: Any = DistributedDataParallel(AddOwn())
        ddp.register_comm_hook(state, comm_hooks.post_localSGD_hook)
        grads = []
        for _ in range(2):
            ddp.zero_grad()
            (ddp(torch.ones(2, 2), 0) * rank).sum().backward()
            grads.append(ddp.module.p.grad[0, 0].item())
        return grads

    assert run_ranks(4, program) == [[1.5, 0.5]] * 2 + [[1.5, 2.5]] * 2
