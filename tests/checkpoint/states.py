"""States to save and load in tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import tilework.distributed as dist
from tilework.dtensor import Placement, Replicate, distribute_tensor, init_device_mesh
from tilework.sharded import EnumerableShardingSpec, ShardMetadata, shard_tensor


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor whose elements differ."""
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def dtensor(full: Tensor, shape: tuple[int, ...], placements: list[Placement]) -> Any:
    return distribute_tensor(full, init_device_mesh("cpu", shape), placements)


def in_rows(full: Tensor, sizes: list[int]) -> Any:
    """A sharded tensor of uneven rows, dealt to ranks in turn, the last ones first."""
    shards, start, ranks = [], 0, dist.get_world_size()
    for number, size in enumerate(sizes):
        place = f"rank:{(ranks - 1 - number) % ranks}/cpu"
        shards.append(ShardMetadata([start, 0], [size, full.shape[1]], place))
        start += size
    return shard_tensor(full, EnumerableShardingSpec(shards))


def zeros_like(value: Any) -> Any:
    """The same layout, of zeros."""
    if hasattr(value, "like"):
        return value.like([torch.zeros_like(t) for t in value.local_tiles()])
    return torch.zeros_like(value)


def full(value: Any) -> Tensor:
    result: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return result


def model(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def train(module: nn.Module, optimizer: Any, *others: Any, steps: int = 1) -> None:
    """Steps on random inputs."""
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.rand(6, 8)).pow(2).mean().backward()
        optimizer.step()
        for each in others:
            each.step()


__all__ = ["Replicate", "dtensor", "full", "in_rows", "model", "numbers", "train", "zeros_like"]
