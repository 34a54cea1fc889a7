"""PowerSGD: settings, what it sends, and that what it leaves out is not lost."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.parallel.data_parallel.models import mse, seeded
from tests.rounding import assert_close
from tilework.parallel import DistributedDataParallel
from tilework.parallel.comm_hooks import (
    CommHook,
    PowerSGDState,
    batched_powerSGD_hook,
    orthogonalize,
    powerSGD_hook,
)
from tilework.testing import run_ranks

BOTH = pytest.mark.parametrize("hook", [powerSGD_hook, batched_powerSGD_hook])


@pytest.mark.parametrize(
    ("start", "feedback", "warm"),
    [
        (start, feedback, warm)
        for start, feedback, warm in itertools.product([0, 1], [True, False], [True, False])
        if feedback or warm
    ],
)
def test_buckets_must_be_rebuilt_first(start: int, feedback: bool, warm: bool) -> None:
    with pytest.raises(ValueError, match="Expect `start_powerSGD_iter` > 1 if"):
        PowerSGDState(None, 1, start, use_error_feedback=feedback, warm_start=warm)


def test_without_memory_it_may_start_at_once() -> None:
    PowerSGDState(None, 1, 0, use_error_feedback=False, warm_start=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"matrix_approximation_rank": 0}, "at least 1; got 0"),
        ({"min_compression_rate": 0}, "must be positive, got 0"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PowerSGDState(None, **settings)


def net() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 24)))


def train(
    rank: int, hook: CommHook | None, steps: int = 40, **settings: Any
) -> tuple[float, PowerSGDState, list[Tensor]]:
    ddp: Any = DistributedDataParallel(net(), bucket_cap_mb=0.003)
    state = PowerSGDState(None, **{"start_powerSGD_iter": 2, "min_compression_rate": 1, **settings})
    if hook is not None:
        ddp.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.3)
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(2, 16, 24, generator=generator)
    loss = torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = mse(ddp(x[rank::2]), y[rank::2])
        loss.backward()
        optimizer.step()
    return loss.item(), state, [p.detach().clone() for p in ddp.parameters()]


@BOTH
def test_it_reaches_nearly_the_loss_of_an_average(hook: CommHook) -> None:
    plain = sum(loss for loss, _, _ in run_ranks(2, lambda rank: train(rank, None)))
    ranks = run_ranks(2, lambda rank: train(rank, hook))
    assert sum(loss for loss, _, _ in ranks) < 1.4 * plain
    assert all(map(torch.equal, ranks[0][2], ranks[1][2]))
    stats = ranks[0][1].compression_stats()
    assert stats.rate > 5
    assert stats.bytes_before > stats.bytes_after > 0


def test_a_full_rank_is_the_average() -> None:
    plain = run_ranks(2, lambda rank: train(rank, None, 4))[0][2]
    settings = {"matrix_approximation_rank": 24, "min_compression_rate": 1e-9}
    full = run_ranks(2, lambda rank: train(rank, powerSGD_hook, 4, **settings))[0][2]
    for own, wanted in zip(full, plain, strict=True):
        assert_close(own, wanted, rtol=1e-3, atol=1e-4)


def test_gradients_in_channels_last_are_averaged() -> None:
    def program(rank: int, hook: CommHook | None) -> Tensor:
        conv: Any = seeded(lambda: nn.Conv2d(4, 6, 3))
        ddp: Any = DistributedDataParallel(conv.to(memory_format=torch.channels_last))
        if hook is not None:
            state = PowerSGDState(None, 6, start_powerSGD_iter=2, min_compression_rate=1e-9)
            ddp.register_comm_hook(state, hook)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(3):
            ddp.zero_grad()
            ddp(torch.randn(2, 4, 5, 5, generator=generator)).square().mean().backward()
        gradient: Tensor = conv.weight.grad
        return gradient

    plain = run_ranks(2, lambda rank: program(rank, None))
    full = run_ranks(2, lambda rank: program(rank, powerSGD_hook))
    assert_close(full[0], plain[0], rtol=1e-3, atol=1e-5)
    assert torch.equal(*full)


@BOTH
def test_errors_are_fed_back(hook: CommHook) -> None:
    """With one matrix kept fixed, the sums of what was sent approach the sums of what was asked."""

    def program(rank: int, feedback: bool) -> Tensor:
        layer: Any = nn.Linear(12, 12, bias=False)
        ddp: Any = DistributedDataParallel(layer)
        ddp.register_comm_hook(
            PowerSGDState(
                None,
                start_powerSGD_iter=2,
                min_compression_rate=0.1,
                use_error_feedback=feedback,
            ),
            hook,
        )
        generator = torch.Generator().manual_seed(5)
        wanted = torch.randn(12, 12, generator=generator)
        sent = torch.zeros(12, 12)
        for step in range(62):
            ddp.zero_grad()
            ddp(torch.eye(12)).mul(wanted.t()).sum().backward()
            if step >= 2:
                sent += layer.weight.grad
        error: Tensor = (sent / 60 - wanted).norm() / wanted.norm()
        return error

    with_feedback = run_ranks(2, lambda rank: program(rank, True))[0]
    without = run_ranks(2, lambda rank: program(rank, False))[0]
    assert with_feedback < 0.2 < without


def test_states_are_saved() -> None:
    state = PowerSGDState(None, start_powerSGD_iter=5)
    state.iter, state.error_dict[0] = 3, torch.ones(2)
    again = pickle.loads(pickle.dumps(state))
    assert again.iter == 3
    assert torch.equal(again.error_dict[0], torch.ones(2))
    drawn = [torch.randn(3, generator=copy.copy(each).generator) for each in (state, again)]
    assert torch.equal(*drawn)


@given(st.integers(1, 8), st.integers(1, 4), st.booleans(), st.integers(0, 2**16))
def test_columns_are_orthonormal_or_zero(rows: int, columns: int, zero: bool, seed: int) -> None:
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    if zero:
        matrix[:, -1] = 0
    orthogonalize(matrix)
    product = matrix.t() @ matrix
    assert_close(product, torch.diag(product.diagonal().round()), rtol=0, atol=1e-4)
    assert torch.isfinite(matrix).all()


def test_a_matrix_of_zeros() -> None:
    matrix = torch.zeros(4, 2)
    orthogonalize(matrix)
    assert not matrix.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_columns_stay_however_long_they_are(dtype: torch.dtype) -> None:
    matrix = torch.randn(4096, 3, generator=torch.Generator().manual_seed(7)).to(dtype)
    matrix[:, 1] = matrix[:, 0]  # depends on column 0
    matrix[:, 2] *= 1e-3
    orthogonalize(matrix)
    assert_close(matrix.float().norm(dim=0), torch.tensor([1.0, 0.0, 1.0]), rtol=0, atol=2e-2)
