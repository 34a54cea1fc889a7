"""Training with everything together: the same losses as without any sharding."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tilework.distributed as dist
from tests.rounding import assert_close
from tests.sharded.ranks_and_specs import chunks, grid, on
from tilework.sharded import (
    ShardedOptimizer,
    ShardedTensor,
    ShardingPlan,
    ShardingSpec,
    named_params_with_sharded_tensor,
    pre_load_state_dict_hook,
    shard_module,
)
from tilework.testing import run_ranks

WORDS, WIDTH, BATCH, STEPS = 11, 6, 6, 6


class Model(nn.Module):
    """Guesses the next word; the table of words is used at both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        output: Tensor = self.head(self.norm(torch.tanh(self.hidden(self.table(words)))))
        return output


def loss_of(model: nn.Module, step: int, rank: int, ranks: int) -> Tensor:
    """This rank's part of the mean over a batch."""
    words = (torch.arange(BATCH + 1) * (step + 3)) % WORDS
    mine = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    guesses = model(words[:-1][mine])
    return F.cross_entropy(guesses, words[1:][mine], reduction="sum") / BATCH


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, ShardedTensor) else tensor.detach()


def step_of(model: nn.Module, optimizer: Any, step: int, rank: int, ranks: int) -> Tensor:
    optimizer.zero_grad()
    loss = loss_of(model, step, rank, ranks)
    torch.autograd.backward(loss)
    for parameter in model.parameters():
        # A plain one has the gradient of this rank's loss only.
        if not isinstance(parameter, ShardedTensor) and ranks > 1 and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
    optimizer.step()
    return loss.detach()


def new_model() -> Model:
    torch.manual_seed(3)
    return Model()


def models_of(ranks: int) -> list[Model]:
    """Rank 0's is the plain run's. Ranks that are threads cannot make them: they draw from one
    generator."""
    return [new_model(), *(Model() for _ in range(1, ranks))]


def plain_run(kind: Any) -> tuple[list[float], dict[str, Tensor]]:
    model = new_model()
    optimizer = kind(model.parameters(), lr=0.05)
    losses = [step_of(model, optimizer, step, 0, 1).item() for step in range(STEPS)]
    return losses, {name: value.detach() for name, value in model.named_parameters()}


UNEVEN = grid([7, 4], [2, 4], [2, 0, 2, 2])  # rank 1 has nothing
CASES: dict[str, tuple[ShardingSpec, ShardingSpec, ShardingSpec]] = {
    "rows, then columns": (chunks(0, [0, 1, 2]), chunks(0, [2, 1]), chunks(1, [0, 1, 2])),
    "uneven, then one rank": (UNEVEN, chunks(1, [1, 0, 1]), chunks(0, [1])),
}


def sharded_run(rank: int, models: list[Model], specs: tuple[ShardingSpec, ...], kind: Any) -> Any:
    table, hidden, later = specs
    model = models[rank]
    # What stays plain must be alike everywhere.
    for parameter in (model.norm.weight, model.norm.bias, model.hidden.bias):
        dist.broadcast(parameter.detach(), 0)
    shard_module(model, ShardingPlan({"table.weight": table, "hidden.weight": hidden}))
    optimizer = ShardedOptimizer(named_params_with_sharded_tensor(model), kind, lr=0.05)
    losses = []
    for step in range(STEPS):
        loss = step_of(model, optimizer, step, rank, 3)
        dist.all_reduce(loss)
        losses.append(loss.item())
        if step == 2:
            optimizer.reshard_("table.weight", later)
            model, optimizer = saved_and_loaded(model, optimizer, kind)
    assert model.head.weight is model.table.weight
    return losses, {name: whole(value) for name, value in model.named_parameters()}


def saved_and_loaded(
    model: Model, optimizer: ShardedOptimizer, kind: Any
) -> tuple[Model, ShardedOptimizer]:
    """The same in a new model, in which one parameter has another layout."""
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    made = Model()
    spec = model.table.weight.sharding_spec()  # type: ignore[attr-defined]
    fit = chunks(1, [2, 0])
    shard_module(made, ShardingPlan({"table.weight": spec, "hidden.weight": fit}))
    made.register_load_state_dict_pre_hook(pre_load_state_dict_hook)  # type: ignore[no-untyped-call]
    made.load_state_dict(states[0])
    again = ShardedOptimizer(named_params_with_sharded_tensor(made), kind, lr=0.05)
    again.load_state_dict(states[1])
    return made, again


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("case", CASES)
def test_the_same_as_without_sharding(case: str, kind: Any) -> None:
    losses, values = plain_run(kind)
    assert losses[-1] != losses[0]
    models = models_of(3)
    for found, tensors in on(3, lambda rank: sharded_run(rank, models, CASES[case], kind)):
        assert found == pytest.approx(losses, rel=1e-4)
        for name, value in values.items():
            assert_close(tensors[name], value, rtol=1e-3, atol=1e-5)


def test_in_processes() -> None:
    losses, _ = plain_run(torch.optim.AdamW)
    specs, kind = CASES["uneven, then one rank"], torch.optim.AdamW
    limit = timedelta(seconds=180)
    for found, _ in run_ranks(
        3, sharded_run, models_of(3), specs, kind, kind="processes", timeout=limit
    ):
        assert found == pytest.approx(losses, rel=1e-4)
