"""A small model in each kind of parallelism, and its inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.gpu.world import Place
from tilework.dtensor import Shard, distribute_module, distribute_tensor
from tilework.parallel import (
    ColwiseParallel,
    DistributedDataParallel,
    RowwiseParallel,
    fully_shard,
    parallelize_module,
)

WIDTH, ROWS, LAYERS = 16, 12, 2


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x + self.dropout(self.down(F.gelu(self.up(x)))))
        return y


WAYS = ("plain", "dtensor", "plan", "fsdp", "ddp")


def make(place: Place, way: str, dropout: float = 0.0, layers: int = LAYERS) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Layer(dropout) for _ in range(layers))).to(place.device)
    mesh = place.mesh()
    if way == "dtensor":
        return distribute_module(model, mesh)
    if way == "plan":
        return parallelize_module(
            model, mesh, {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
        )
    if way == "fsdp":
        for layer in model:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return DistributedDataParallel(model) if way == "ddp" else model


def inputs(place: Place, way: str, step: int) -> Any:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, WIDTH, generator=generator).to(place.device)
    return distribute_tensor(x, place.mesh(), [Shard(0)]) if way == "dtensor" else x
