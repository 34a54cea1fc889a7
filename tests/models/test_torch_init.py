"""torch.nn.init while another library's functions are in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import init

from tilework import sharded
from tilework.dtensor import Shard, distribute_tensor, init_device_mesh
from tilework.models.torch_init import original
from tilework.sharded import ChunkShardingSpec
from tilework.testing import run_ranks

FILLS: dict[str, dict[str, Any]] = {
    "uniform_": {"a": 1.0, "b": 2.0},
    "normal_": {"mean": 3.0},
    "constant_": {"val": 4.0},
    "kaiming_uniform_": {},
}


def guarded(of_torch: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
    """A function as libraries put into torch.nn.init, with a condition of their own."""

    def fill(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor if getattr(tensor, "_is_loaded", False) else of_torch(tensor, *args, **kwargs)

    fill.__name__ = name
    return fill


def test_other_functions_are_themselves() -> None:
    def uniform_() -> None: ...

    for func in (uniform_, torch.add, init.xavier_normal_, Tensor.uniform_):
        assert original(func) is func


@pytest.mark.parametrize("name", FILLS)
def test_tensors_are_filled_as_without_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(rank: int) -> list[Tensor]:
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (2,))
        spec = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        tensors: list[Any] = [
            distribute_tensor(torch.zeros(6, 4), mesh, [Shard(0)]),
            sharded.zeros(spec, 6, 4),
        ]
        return [getattr(init, name)(each, **FILLS[name]).full_tensor() for each in tensors]

    expected = run_ranks(2, program)
    function = guarded(getattr(init, name), name)
    monkeypatch.setattr(init, name, function)
    assert original(function) is not function
    for found, plain in zip(run_ranks(2, program), expected, strict=True):
        assert all(map(torch.equal, found, plain))
        assert all(each.abs().sum() > 0 for each in found)
