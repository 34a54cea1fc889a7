"""What torch.compile makes of functions that use DTensors: in fresh processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tilework.distributed as dist
from tests.jobs import Job, Rank
from tilework.dtensor import (
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from tilework.errors import CaptureError

Function = Callable[..., Any]


def scaled(x: Any) -> Any:
    x = torch.relu(x) * 2 + 1
    return x.full_tensor()


def summed(x: Any) -> Any:
    return (x.sum() * 2 + 1).full_tensor()


def moved(x: Any) -> Any:
    return x.redistribute(placements=[Shard(1)]).to_local() - 1


def asked(x: Any) -> Any:
    rows, columns = x.shape
    return torch.ones(rows, columns) * x.device_mesh.size()


def branching(x: Any) -> Any:
    return x if x.sum().full_tensor() < 100 else -x


def printing(x: Any) -> Any:
    print(x.sum().full_tensor().tolist())
    return x + 0


def compiled(rank: Rank) -> None:
    dist.init_process_group(
        "shm", init_method=f"file://{rank.folder}/store", rank=rank.number, world_size=rank.size
    )
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(12.0).view(4, 3) - 5, mesh, [Shard(0)])
    for function in (scaled, summed, moved, asked):
        eager = function(x)
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        for _ in range(3):
            assert torch.equal(compiled(x), eager), function
    module: Any = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    truth = distribute_module(module, mesh)(x).full_tensor()
    compiled_module: Any = torch.compile(module, backend="aot_eager", fullgraph=True)
    weight: Any = module[0].weight
    for _ in range(3):
        weight.grad = None
        found = compiled_module(x)
        assert torch.allclose(found.full_tensor(), truth)
        found.sum().backward()
    assert weight.grad.placements == (Replicate(),)
    expected = weight.grad.full_tensor()
    weight.grad = None
    module(x).sum().backward()
    assert torch.equal(weight.grad.full_tensor(), expected)
    with torch.no_grad():
        for _ in range(3):
            assert torch.allclose(compiled_module(x).full_tensor(), truth)
    both = torch.compile(branching, backend="aot_eager", fullgraph=True)
    for each in (x, x, x, x * 1000 + 900, x):
        assert torch.equal(both(each).full_tensor(), branching(each).full_tensor())
    partly = torch.compile(printing, backend="aot_eager")
    partly(x)
    with pytest.warns(UserWarning, match=r"runs printing as it is.*makes a list of a tensor"):
        assert torch.equal(partly(x).full_tensor(), x.full_tensor())
    assert torch.equal(partly(x).full_tensor(), x.full_tensor())  # without another warning
    whole = torch.compile(printing, backend="aot_eager", fullgraph=True)
    whole(x)
    with pytest.raises(CaptureError, match=r"makes a list of a tensor at .*in printing"):
        whole(x)
    assert torch.compile(lambda y: y + 1, backend="aot_eager")(torch.ones(2)).tolist() == [2.0, 2.0]
    dist.destroy_process_group()


def test_functions_and_modules_with_dtensors_are_recorded(tmp_path: Path) -> None:
    with Job(tmp_path, 2, compiled) as job:
        for number in range(2):
            job.hear(number)
