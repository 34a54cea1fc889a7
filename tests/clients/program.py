"""The model and data of the clients' programs, and the line by which they report values."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tilework.torch_backend

#: Begins the line with a program's values, as JSON.
MARK = "VALUES "
BACKENDS = ("gloo", tilework.torch_backend.BACKEND_NAME)


def net() -> nn.Sequential:
    """A small model, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def rows(count: int = 32) -> TensorDataset:
    """Inputs, and targets that can be learnt."""
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True))


def loss_of(model: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean squared error of a batch."""
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def report(values: Any) -> None:
    """Print the values of a program, which ran on the backend that the command line names."""
    if dist.is_initialized():  # not where workers made the group
        assert dist.get_backend() == sys.argv[1]
    print(MARK + json.dumps(values), flush=True)


def main(train: Callable[[], Any]) -> None:
    """Run ``train`` in a group of the backend that the command line names, and report values."""
    dist.init_process_group(sys.argv[1])
    report([dist.get_rank(), train()])
    dist.destroy_process_group()
