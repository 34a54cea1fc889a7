"""Arguments that do not fit together are refused, with what to pass instead."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch import nn

import tilework.distributed as dist
from tilework.dtensor import init_device_mesh
from tilework.parallel import DistributedDataParallel
from tilework.testing import run_ranks


def test_misuse() -> None:
    def program(rank: int) -> None:
        with pytest.raises(RuntimeError, match="is not needed when a module doesn't have any"):
            DistributedDataParallel(nn.ReLU())
        with pytest.raises(RuntimeError, match="weight, bias have none yet: run the lazy module"):
            DistributedDataParallel(nn.LazyLinear(3))
        ddp: Any = DistributedDataParallel(nn.Linear(1, 1))
        with pytest.raises(RuntimeError, match="is a DistributedDataParallel already"):
            DistributedDataParallel(ddp)
        with pytest.raises(RuntimeError, match="its module '0' is a DistributedDataParallel"):
            DistributedDataParallel(nn.Sequential(ddp))
        with pytest.raises(TypeError, match=r"takes an nn\.Module, got int"):
            DistributedDataParallel(3)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="only work with single-device modules"):
            DistributedDataParallel(nn.Linear(1, 1), device_ids=[0])
        with pytest.raises(ValueError, match="device_ids can only be None or contain a single"):
            DistributedDataParallel(nn.Linear(1, 1), device_ids=[0, 1])
        for wrong in ("25", [25]):
            with pytest.raises(TypeError, match="bucket_cap_mb must be a number"):
                DistributedDataParallel(nn.Linear(1, 1), bucket_cap_mb=wrong)  # type: ignore[arg-type]
        for size in (math.inf, math.nan):
            with pytest.raises(ValueError, match="positive and finite"):
                DistributedDataParallel(nn.Linear(1, 1), bucket_cap_mb=size)
        with pytest.raises(ValueError, match="bucket_cap_mb must be positive"):
            DistributedDataParallel(nn.Linear(1, 1), bucket_cap_mb=-1)
        mesh = init_device_mesh("cpu", (1, 1))
        with pytest.raises(RuntimeError, match="Only 1D device mesh is supported"):
            DistributedDataParallel(nn.Linear(1, 1), device_mesh=mesh)
        with pytest.raises(RuntimeError, match="Cannot specify both"):
            DistributedDataParallel(
                nn.Linear(1, 1), device_mesh=mesh, process_group=dist.get_default_group()
            )
        with pytest.raises(ValueError, match="needs param_to_hook_all_reduce"):
            DistributedDataParallel(
                nn.Linear(1, 1), delay_all_reduce_named_params=[("bias", nn.Parameter())]
            )

    run_ranks(1, program)
