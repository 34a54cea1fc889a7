"""Small modules whose gradients are reduced together train as plain ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilework.distributed as dist
from tests.rounding import assert_close
from tilework.parallel import fully_shard
from tilework.testing import run_ranks


class Chain(nn.Module):
    """Layers, called in an order that may change."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.order = [0, 1, 2, 3]

    def forward(self, x: Tensor) -> Tensor:
        for at in self.order:
            x = torch.tanh(self.layers[at](x))
        return x


def sharded(**settings: Any) -> Any:
    model = Chain()
    for layer in model.layers:
        fully_shard(layer, **settings)
    return fully_shard(model, **settings)


def messages(call: Callable[[], Any]) -> int:
    group = dist.get_default_group()
    before = group.get_sequence_number_for_group()
    call()
    return group.get_sequence_number_for_group() - before


def freeze_ahead(model: Any) -> None:
    """Freeze a layer that was gathered, and has a node, but has not run yet."""

    def freeze(*_: Any) -> None:
        model.layers[2].requires_grad_(False)

    model.layers[0].register_forward_pre_hook(freeze)


def leave_out(model: Any) -> None:
    model.order = [0, 1, 3]


def call_twice(model: Any) -> None:
    model.order = [0, 1, 1, 2, 3, 0]


def turn_round(model: Any) -> None:
    model.order = [3, 2, 1, 0]


def new_weight(model: Any) -> None:
    """Assign a weight while a layer before runs."""

    def assign(*_: Any) -> None:
        model.layers[2].weight = nn.Parameter(torch.full((3, 3), 0.3))

    model.layers[0].register_forward_pre_hook(assign)


@pytest.mark.parametrize(
    "change",
    [freeze_ahead, leave_out, call_twice, turn_round, new_weight],
    ids=lambda c: c.__name__,
)
@pytest.mark.parametrize("reshard", [None, False])
def test_a_change_between_steps(change: Callable[[Any], None], reshard: bool | None) -> None:
    def program(rank: int) -> None:
        plain, model = Chain(), sharded(reshard_after_forward=reshard)
        for step in range(4):
            x = torch.randn(2, 3, generator=torch.Generator().manual_seed(step))
            for each in (plain, model):
                each.zero_grad()
                if step == 2:
                    change(each)
                each(x).sum().backward()
            for wanted, mine in zip(plain.parameters(), model.parameters(), strict=True):
                assert (wanted.grad is None) == (mine.grad is None)
                if wanted.grad is not None:
                    assert_close(mine.grad.full_tensor(), wanted.grad)

    run_ranks(2, program)


def test_messages_of_backward() -> None:
    """Gradients wait for a common message; a module with a hook has a message alone."""

    def program(rank: int) -> None:
        model, x, seen = sharded(), torch.ones(2, 3), list[int]()
        for reductions in (4, 1):
            loss = model(x).sum()
            assert messages(loss.backward) == 1 + reductions  # layers are gathered together
        model.layers[1].set_all_reduce_hook(lambda grad: seen.append(grad.numel()))
        loss = model(x).sum()
        assert messages(loss.backward) == 1 + 2
        assert seen == [2 * 3 + 2]  # two rows of the weight, two elements of the bias

    run_ranks(2, program)


def test_a_module_that_forward_left_out_is_not_kept_in_memory() -> None:
    def program(rank: int) -> None:
        model, kept = sharded(), list[Any]()

        def look(*_: Any) -> None:
            kept.append(weakref.ref(model.layers[2]._fsdp_state._gathered.parts[0].block))

        model(torch.ones(1, 3)).sum().backward()
        model.order = [0, 1, 3]
        model.layers[0].register_forward_hook(look)
        loss = model(torch.ones(1, 3)).sum()
        assert kept[0]() is None
        loss.backward()

    run_ranks(2, program)


def test_gradients_of_a_module_that_a_pass_does_not_reach_wait_on() -> None:
    def program(rank: int) -> None:
        model, x = sharded(), torch.ones(1, 3)
        for _ in range(2):
            model(x).sum().backward()
        wanted = [parameter.grad.full_tensor() / 2 for parameter in model.parameters()]
        model.zero_grad()
        model.set_requires_gradient_sync(False)
        model(x).sum().backward()
        model.set_requires_gradient_sync(True)
        ends = model.layers[3].weight._local_tensor, model.layers[3].bias._local_tensor
        torch.autograd.grad(model(x).sum(), ends)
        for parameter, grad in list(zip(model.parameters(), wanted, strict=True))[:6]:
            assert_close(parameter.grad.full_tensor(), grad)

    run_ranks(2, program)
