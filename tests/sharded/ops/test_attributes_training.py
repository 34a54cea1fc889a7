"""A model of which each parameter is cut differently trains as the unsharded one."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.sharded.ops.op_checks import RANKS, close, shards_of, values
from tests.sharded.ranks_and_specs import chunks, grid
from tilework.testing import run_ranks

SPECS = {
    "embed.weight": chunks(0, [0, 2, 1, 0]),
    "hidden.weight": grid([3, 5], [2, 4], [2, 0, 1]),
    "hidden.bias": chunks(0, [1]),
    "out.weight": chunks(1, [2, 1]),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden = nn.Embedding(11, 6), nn.Linear(6, 8)
        self.out = nn.Linear(8, 11, bias=False)
        self.double()
        for seed, parameter in enumerate(self.parameters()):
            parameter.data.copy_(values(*parameter.shape, seed=seed) / 4)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.out(torch.tanh(self.hidden(self.embed(ids))))
        return result


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Ids and targets: of another size on each rank."""
    generator = torch.Generator().manual_seed(100 * rank + step)
    ids, targets = torch.randint(11, (2, 2 + rank), generator=generator)
    return ids, targets


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    ids, targets = batch(rank, step)
    return F.cross_entropy(model(ids), targets)


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_as_the_unsharded_model(kind: Literal["threads", "processes"]) -> None:
    def program(rank: int) -> None:
        whole, model = Model(), Model()
        for name, spec in SPECS.items():
            module: Any = getattr(model, name.split(".")[0])
            last = name.split(".")[1]
            sharded = shards_of(getattr(module, last).detach(), spec, rank)
            setattr(module, last, nn.Parameter(sharded))
        optimizers = [torch.optim.AdamW(m.parameters(), 0.05) for m in (whole, model)]
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses = [loss_of(whole, each, step) for each in range(RANKS)]
            torch.autograd.backward(torch.stack(losses).sum())
            loss = loss_of(model, rank, step)
            close(loss, losses[rank])
            torch.autograd.backward(loss)
            norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (whole, model)]
            close(norms[1], norms[0])
            for optimizer in optimizers:
                optimizer.step()
        parameters: Any = zip(whole.parameters(), model.parameters(), strict=True)
        for expected, found in parameters:
            close(found.full_tensor().detach(), expected.detach())

    run_ranks(RANKS, program, kind=kind)
