"""Batches, and the plainest model."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


def rows(*shape: int, count: int = 8) -> list[tuple[Tensor, ...]]:
    """Batches of one random tensor."""
    return [(torch.randn(shape),) for _ in range(count)]


def labelled(*shape: int, classes: int, count: int = 8) -> list[tuple[Tensor, ...]]:
    """Batches of a random tensor and of a class for each row."""
    return [(x, torch.randint(classes, shape[:1])) for (x,) in rows(*shape, count=count)]


def tokens(*shape: int, size: int, count: int = 8) -> list[tuple[Tensor, ...]]:
    """Batches of one tensor of tokens."""
    return [(torch.randint(size, shape),) for _ in range(count)]


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for one, other in pairwise(widths):
        layers += [nn.Linear(one, other), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
