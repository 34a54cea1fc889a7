"""Replicas along one axis of a mesh whose parameters are sharded along another."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from tests.parallel.data_parallel.models import ROWS, batch, mlp, mse
from tests.rounding import assert_close
from tilework.dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from tilework.parallel import (
    ColwiseParallel,
    DistributedDataParallel,
    RowwiseParallel,
    parallelize_module,
)
from tilework.testing import run_ranks


def test_beside_tensor_parallelism() -> None:
    model: Any = mlp()

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        inner: Any = copy.deepcopy(model)
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(inner, mesh["tp"], plan)
        ddp: Any = DistributedDataParallel(inner, device_mesh=mesh["dp"], bucket_cap_mb=0.001)
        plain: Any = copy.deepcopy(model)
        own = slice(rank // 2 * ROWS, (rank // 2 + 1) * ROWS)
        for step in range(3):
            x, y = batch(2, step)
            plain.zero_grad()
            ddp.zero_grad()
            mse(plain(x), y).backward()
            mse(ddp(x[own]), y[own]).backward()
            for own_param, wanted in zip(ddp.parameters(), plain.parameters(), strict=True):
                grad: Any = own_param.grad
                assert_close(grad.full_tensor(), wanted.grad)

    run_ranks(4, program)


def test_dtensor_parameters_on_another_axis() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        module: Any = nn.Module()
        for name, placement in (("cut", Shard(0)), ("same", Replicate())):
            value = distribute_tensor(torch.ones(4), mesh["tp"], [placement])
            module.register_parameter(name, nn.Parameter(value))
        module.forward = lambda x: (module.cut * x + module.same).sum()
        ddp: Any = DistributedDataParallel(module, device_mesh=mesh["dp"])
        ddp(float(rank // 2)).backward()
        assert module.cut.grad.full_tensor().tolist() == [0.5] * 4
        assert module.same.grad.full_tensor().tolist() == [1.0] * 4

    run_ranks(4, program)
