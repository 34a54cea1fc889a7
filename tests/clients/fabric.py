"""Lightning's Fabric, with DDP: ``tilework run -n 2 fabric.py tilework``."""

from __future__ import annotations

import sys
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from torch.utils.data import DataLoader

import tilework.torch_backend  # noqa: F401  # registers the backend
from tests.clients.program import loss_of, net, report, rows


def train(backend: str) -> list[Any]:
    strategy = DDPStrategy(process_group_backend=backend)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    made = net()
    model, optimizer = fabric.setup(made, torch.optim.AdamW(made.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(DataLoader(rows(), 4, shuffle=True))
    seen: list[Any] = []
    for _ in range(2):
        for batch in loader:
            loss = loss_of(model, batch)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(float(fabric.all_reduce(loss.detach(), reduce_op="mean")))
    seen.append(fabric.all_gather(torch.tensor(fabric.global_rank)).tolist())
    seen.append(fabric.broadcast({"rank": fabric.global_rank}))
    return [fabric.global_rank, seen]


if __name__ == "__main__":
    report(train(sys.argv[1]))
