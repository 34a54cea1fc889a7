"""Hooks and closures of torch's optimizers: what they read and write is the optimizer's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.rounding import assert_close
from tilework.dtensor import DTensor, Shard, distribute_tensor, init_device_mesh
from tilework.dtensor.internal import digest_of
from tilework.errors import CollectiveMismatchError
from tilework.testing import run_ranks

VALUES = torch.arange(5.0) / 4


def _full(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _halve_rate(optimizer: Any, p: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def _halve_momentum(optimizer: Any, p: Any) -> None:
    if p in optimizer.state:
        optimizer.state[p]["momentum_buffer"].mul_(0.5)


def _new_momentum(optimizer: Any, p: Any) -> None:
    if p in optimizer.state:
        optimizer.state[p]["momentum_buffer"] = torch.ones_like(p)


def _clear(optimizer: Any, p: Any) -> None:
    optimizer.state.clear()


def _double_gradient(optimizer: Any, p: Any) -> None:
    p.grad = p.grad * 2


def _no_gradient(optimizer: Any, p: Any) -> None:
    p.grad = None


def _other_data(optimizer: Any, p: Any) -> None:
    p.data = p.data * 2


def _no_parameters(optimizer: Any, p: Any) -> None:
    optimizer.param_groups[0]["params"] = []


def _one_more(optimizer: Any, p: Any) -> None:
    if len(optimizer.param_groups) == 1:
        other = nn.Parameter(p.detach().clone())
        other.grad = p.grad.clone()
        optimizer.add_param_group({"params": [other], "lr": 1.0})


def _write_weight(optimizer: Any, p: Any) -> None:
    with torch.no_grad():
        p.mul_(0.5)


CHANGES = (
    *(_halve_rate, _halve_momentum, _new_momentum, _clear, _double_gradient, _no_gradient),
    *(_other_data, _no_parameters, _one_more, _write_weight),
)


def _trained(mesh: Any, when: str, change: Callable[[Any, Any], None]) -> dict[str, Any]:
    """The values and the rates after three steps."""
    p = nn.Parameter(
        VALUES.clone() if mesh is None else distribute_tensor(VALUES, mesh, [Shard(0)])
    )
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    if when == "before":
        optimizer.register_step_pre_hook(lambda its, args, kwargs: change(its, p))
    elif when == "after":
        optimizer.register_step_post_hook(lambda its, args, kwargs: change(its, p))

    def close() -> Tensor:
        optimizer.zero_grad()
        loss: Any = (p * p).sum()
        loss.backward()
        if when == "within":
            change(optimizer, p)
        return loss  # type: ignore[no-any-return]

    for _ in range(3):
        if when == "within":
            optimizer.step(close)
        else:
            close()
            optimizer.step()
    params = [each for group in optimizer.param_groups for each in group["params"]]
    states = [optimizer.state.get(each, {}).get("momentum_buffer") for each in params]
    return {
        "rates": [group["lr"] for group in optimizer.param_groups],
        "parameters": [_full(each) for each in (p, *params)],
        "momentum": [None if each is None else _full(each) for each in states],
    }


@pytest.mark.parametrize("when", ["before", "within", "after"])
@pytest.mark.parametrize("change", CHANGES)
def test_step_hooks_and_closures_change_what_the_step_does(
    when: str, change: Callable[[Any, Any], None]
) -> None:
    expected = _trained(None, when, change)

    def program(rank: int) -> dict[str, Any]:
        return _trained(init_device_mesh("cpu", (2,)), when, change)

    for found in run_ranks(2, program):
        assert found["rates"] == expected["rates"]
        assert_close(found["parameters"], expected["parameters"])
        assert_close(found["momentum"], expected["momentum"])


def test_hooks_that_are_registered_later_are_within() -> None:
    """Also those of all optimizers, which torch calls first and last."""
    seen: list[Any] = []

    def look(optimizer: Any, args: Any, kwargs: Any) -> None:
        state = optimizer.state[optimizer.param_groups[0]["params"][0]]
        seen.append(sorted(state))

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1,))
        p = nn.Parameter(distribute_tensor(VALUES, mesh, [Shard(0)]))
        optimizer = torch.optim.Adam([p])
        for _ in range(2):
            p.grad = torch.ones_like(p)
            optimizer.step()
            optimizer.register_step_post_hook(look)
        optimizer.step()

    run_ranks(1, program)
    assert seen == [["exp_avg", "exp_avg_sq", "step"]] * 3


def test_a_state_that_one_rank_has_written_parts_the_parameters() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        p = nn.Parameter(distribute_tensor(VALUES, mesh, [Shard(0)]))
        optimizer = torch.optim.Adam([p])
        p.grad = torch.ones_like(p)
        optimizer.step()
        mean, square = [optimizer.state[p][name] for name in ("exp_avg", "exp_avg_sq")]
        assert digest_of(mean) != digest_of(square)
        if rank:
            mean.mul_(2)
        optimizer.step()

    with pytest.raises(CollectiveMismatchError):
        run_ranks(2, program)


def test_a_step_after_one_with_a_scaler_divides_by_no_scale() -> None:
    def trained(p: nn.Parameter) -> Tensor:
        optimizer = torch.optim.SGD([p], lr=0.1, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaled: Any = scaler.scale((p * p).sum())
        scaled.backward()
        scaler.step(optimizer)
        scaler.update()
        loss: Any = (p * p).sum()
        loss.backward()
        optimizer.step()
        return _full(p)

    def program(rank: int) -> Tensor:
        mesh = init_device_mesh("cpu", (2,))
        return trained(nn.Parameter(distribute_tensor(VALUES, mesh, [Shard(0)])))

    assert_close(run_ranks(2, program)[0], trained(nn.Parameter(VALUES.clone())))
