"""Dropout drops the same elements on every mesh, in every layout, and in recomputation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.dtensor.sharded_values import full
from tests.rounding import assert_close
from tests.tables import each
from tilework.dtensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from tilework.dtensor.random.generator import manual_seed
from tilework.mesh import init_device_mesh
from tilework.testing import run_ranks

X = torch.arange(1.0, 6 * 4 * 3 + 1).reshape(6, 4, 3)

LAYOUTS: list[tuple[tuple[int, ...], list[Placement]]] = [
    ((1,), [Replicate()]),
    ((2,), [Shard(0)]),
    ((2,), [Shard(2)]),
    ((3,), [Shard(1, (1, 0, 3))]),
    ((2, 2), [Shard(0), Shard(0)]),
    ((2, 2), [Shard(2), Shard(1)]),
]


def dropped(
    drop: Callable[[Tensor], Tensor], mesh: tuple[int, ...], placements: Sequence[Placement]
) -> tuple[Tensor, Tensor]:
    """What comes of ``X``, and its gradient."""

    def program(rank: int) -> tuple[Tensor, Tensor]:
        made = init_device_mesh("cpu", mesh)
        manual_seed(11, made)
        x = distribute_tensor(X, made, placements).requires_grad_()
        out = drop(x)
        out.sum().backward()  # type: ignore[no-untyped-call]
        return full(out), full(x.grad)

    ranks = 1
    for length in mesh:
        ranks *= length
    found = run_ranks(ranks, program)
    for one in found[1:]:
        assert_close(one, found[0])
    return found[0]


DROPS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "in place": lambda x: F.dropout(x * 1, 0.4, inplace=True),
    "native": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "channels": lambda x: F.dropout1d(x, 0.4),
    "alpha": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "alpha channels": lambda x: F.feature_alpha_dropout(x, 0.4, training=True),
}


@each("name", DROPS)
def test_the_layout_does_not_matter(name: str) -> None:
    found = [dropped(DROPS[name], *layout) for layout in LAYOUTS]
    for one in found[1:]:
        assert_close(one, found[0])
    out, grad = found[0]
    gone = grad == 0
    assert 0 < gone.sum() < X.numel()
    if "alpha" not in name:
        assert_close(out, X * grad)
        assert_close(grad[~gone], torch.full_like(grad[~gone], 1 / 0.6))
    if "channels" in name:
        assert torch.equal(gone, gone[..., :1].expand_as(gone))


def test_what_is_dropped_is_random() -> None:
    def program(rank: int) -> tuple[float, bool]:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(100, 100), mesh, [Shard(0)])
        first, second = F.dropout(x, 0.3), F.dropout(x, 0.3)
        return full(first == 0).float().mean().item(), torch.equal(full(first), full(second))

    for share, same in run_ranks(2, program):
        assert 0.27 < share < 0.33
        assert not same


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    values = F.selu(torch.randn(400, 100, generator=torch.Generator().manual_seed(1)))

    def program(rank: int) -> Tensor:
        mesh = init_device_mesh("cpu", (2,))
        return full(F.alpha_dropout(distribute_tensor(values, mesh, [Shard(0)]), 0.3, True))

    out, _ = run_ranks(2, program)
    assert abs(out.mean() - values.mean()) < 0.05
    assert abs(out.std() - values.std()) < 0.05


def test_nothing_or_all_is_dropped() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(X, mesh, [Shard(0)])
        assert torch.equal(full(F.dropout(x, 0.5, training=False)), X)
        assert torch.equal(full(F.dropout(x, 0.0)), X)
        for drop in (F.dropout, F.dropout1d, F.alpha_dropout, F.feature_alpha_dropout):
            assert not full(drop(x, 1.0, True)).any()
        with pytest.raises(ValueError, match="between 0 and 1"):
            F.dropout(x, 1.5)
        with pytest.raises(RuntimeError, match="between 0 and 1"):
            torch.dropout(x, 1.5, True)
        with pytest.raises(RuntimeError, match="floating-point"):
            torch.dropout(distribute_tensor(torch.ones(2, dtype=torch.int64), mesh), 0.5, True)
        with pytest.raises(RuntimeError, match="at least 2 dimensions"):
            torch.feature_dropout(distribute_tensor(torch.ones(2), mesh), 0.5, True)

    run_ranks(2, program)


def test_terms_are_dropped_alike() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = DTensor.from_local(torch.full((4, 4), rank + 1.0), mesh, [Partial()])
        out = F.dropout(x, 0.5)
        assert isinstance(out, DTensor)
        assert out.placements == (Partial(),)
        assert set(full(out).reshape(-1).tolist()) == {0.0, 6.0}

    run_ranks(2, program)


def _recomputed(rank: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (2,))
    manual_seed(3, mesh)
    x = distribute_tensor(X, mesh, [Shard(0)]).requires_grad_()

    def layer(x: Tensor) -> Tensor:
        return F.dropout(x * x, 0.5)

    out = checkpoint(layer, x, use_reentrant=False)
    assert isinstance(out, Tensor)
    out.sum().backward()  # type: ignore[no-untyped-call]
    return [full(out), full(x.grad)]


def test_recomputation_drops_the_same() -> None:
    for out, grad in run_ranks(2, _recomputed, kind="processes"):
        assert_close(grad * X / 2, out)
        assert 0 < (out == 0).sum() < X.numel()
