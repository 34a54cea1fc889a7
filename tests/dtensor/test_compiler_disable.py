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
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)

Function = Callable[..., Any]

pytestmark = pytest.mark.timeout(180)  # compilers are slow where others are at work, too


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


def compiled(rank: Rank) -> None:
    dist.init_process_group(
        "shm", init_method=f"file://{rank.folder}/store", rank=rank.number, world_size=rank.size
    )
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.arange(12.0).view(4, 3) - 5, mesh, [Shard(0)])
    for function in (scaled, summed, moved, asked):
        eager, compiled = function(x), torch.compile(function, backend="aot_eager")
        with pytest.warns(UserWarning, match=rf"runs {function.__name__} as it is.*capture"):
            assert torch.equal(compiled(x), eager), function
        assert torch.equal(compiled(x), eager)  # without another warning
    module: Any = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    truth = distribute_module(module, mesh)(x).full_tensor()
    with pytest.warns(UserWarning, match="runs Sequential as it is"):
        found = torch.compile(module, backend="aot_eager")(x)  # type: ignore[no-untyped-call]
    assert torch.allclose(found.full_tensor(), truth)
    found.sum().backward()
    weight = module[0].weight
    assert isinstance(weight.grad, DTensor)
    expected = weight.grad.full_tensor()
    weight.grad = None
    module(x).sum().backward()
    assert weight.grad.placements == (Replicate(),)
    assert torch.allclose(weight.grad.full_tensor(), expected)
    whole = torch.compile(lambda x: torch.relu(x) + 1, backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="takes no DTensors: operators on DTensors are not"):
        whole(x)
    assert whole(torch.ones(2)).tolist() == [2.0, 2.0]
    dist.destroy_process_group()


def test_functions_and_modules_with_dtensors_run_as_they_are(tmp_path: Path) -> None:
    with Job(tmp_path, 2, compiled) as job:
        for number in range(2):
            job.hear(number)
