"""What torch.compile makes of functions that use sharded tensors: in fresh processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tilework.distributed as dist
from tests.jobs import Job, Rank
from tilework.sharded import ChunkShardingSpec, shard_parameter, shard_tensor

Function = Callable[..., Any]


def scaled(st: Any) -> Any:
    st = torch.relu(st) * 2 + 1
    return st.full_tensor()


def summed(st: Any) -> Any:
    return st.sum() * 2 + 1


def moved(st: Any) -> Any:
    return st.resharded(ChunkShardingSpec(1, ["rank:1/cpu", "rank:0/cpu"])).full_tensor() - 1


def compiled(rank: Rank) -> None:
    dist.init_process_group(
        "shm", init_method=f"file://{rank.folder}/store", rank=rank.number, world_size=rank.size
    )
    spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
    st = shard_tensor(torch.arange(12.0).view(4, 3) - 5, spec)
    for function in (scaled, summed, moved):
        eager: Tensor = function(st)
        assert torch.equal(torch.compile(function, backend="aot_eager")(st), eager)
    module: Any = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    x = torch.ones(2, 3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.5)
    truth = module(x)
    shard_parameter(module[0], "weight", spec)
    found = torch.compile(module, backend="aot_eager")(x)  # type: ignore[no-untyped-call]
    assert torch.allclose(found, truth)
    found.sum().backward()
    shard: Any = module[0].weight.local_tensor()
    assert torch.allclose(shard.grad, torch.full((2, 3), 4.0))  # both ranks' losses, two rows
    with pytest.raises(Exception, match="operators on sharded tensors are not traced"):
        torch.compile(lambda x: module(x) + 1, backend="aot_eager", fullgraph=True)(x)
    dist.destroy_process_group()


def test_what_is_between_operators_is_compiled(tmp_path: Path) -> None:
    with Job(tmp_path, 2, compiled) as job:
        for number in range(2):
            job.hear(number)
