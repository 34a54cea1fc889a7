"""Models that tests of pipelines cut, and the training of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilework.mesh import init_device_mesh
from tilework.parallel import Schedule, Stages, pipeline
from tilework.testing import run_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(x)))
        return result


class Net(nn.Module):
    def __init__(self, blocks: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.first(x) * self.scale
        if mask is not None:
            x = x * mask[:, None]
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.last(x if mask is None else x + mask[:, None])
        return result


class Listed(Net):
    """The modules are listed in the order of their calls."""

    def __init__(self, blocks: int = 8) -> None:
        super().__init__(blocks)
        last = self.last
        del self.last
        self.last = last


def seeded(kind: Callable[[], nn.Module] = Listed) -> Any:
    torch.manual_seed(0)
    return kind()


def batch(rows: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 3, generator=generator), torch.randn(rows, 2, generator=generator)


def stages_of(model: nn.Module, plan: Schedule, split: Any = "even", **options: Any) -> Stages:
    mesh = init_device_mesh("cpu", (plan.ranks,))
    return pipeline(model, mesh, split=split, schedule=plan, **options)


def together(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {name: value for each in parts for name, value in each.items()}


def piped(
    plan: Schedule,
    kind: Callable[[], nn.Module] = Listed,
    split: Any = "even",
    rows: int = 12,
    **options: Any,
) -> tuple[set[float], dict[str, Tensor | None]]:
    """The losses on all ranks, and the gradients of all stages, of one step."""

    def program(rank: int) -> tuple[float, dict[str, Tensor | None]]:
        stages = stages_of(seeded(kind), plan, split, **options)
        x, target = batch(rows)
        loss = stages.step(x, target=target, loss=F.mse_loss)
        return loss.item(), {name: p.grad for name, p in stages.named_parameters()}

    outcomes = run_ranks(plan.ranks, program)
    return {loss for loss, _ in outcomes}, together(grads for _, grads in outcomes)


def alone(
    microbatches: int, kind: Callable[[], nn.Module] = Listed, rows: int = 12
) -> tuple[float, dict[str, Tensor | None]]:
    """The loss and the gradients of one process, microbatch by microbatch."""
    model, total = seeded(kind), torch.zeros(())
    x, target = batch(rows)
    for a, b in zip(x.tensor_split(microbatches), target.tensor_split(microbatches), strict=True):
        loss = F.mse_loss(model(a), b)
        weight = len(a) / rows
        (loss * weight).backward()  # type: ignore[no-untyped-call]
        total += loss.detach() * weight
    return total.item(), {name: p.grad for name, p in model.named_parameters()}


def assert_equal(got: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    assert got.keys() == expected.keys()
    for name, grad in expected.items():
        mine = got[name]
        assert (mine is None) == (grad is None)
        assert grad is None or (mine is not None and torch.equal(mine, grad)), name
