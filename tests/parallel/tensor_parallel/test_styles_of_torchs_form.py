"""Styles that are written as torch's are: they apply themselves."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tilework.dtensor import DTensor, Shard, distribute_module, distribute_tensor
from tilework.mesh import DeviceMesh, init_device_mesh
from tilework.parallel import ColwiseParallel, ParallelStyle, parallelize_module
from tilework.testing import run_ranks


class Rows(ParallelStyle):
    """Shards a Linear's output features, and gathers its output."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def shard(name: str, module: nn.Module, mesh: DeviceMesh, source: int | None) -> None:
            for key, parameter in module.named_parameters(recurse=False):
                tensor = distribute_tensor(parameter, mesh, [Shard(0)], src_data_rank=source)
                module.register_parameter(key, nn.Parameter(tensor))

        def whole(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.full_tensor()

        function = partial(shard, source=self.src_data_rank)
        return distribute_module(module, device_mesh, function, output_fn=whole)


class Wrapped(ParallelStyle):
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return nn.Sequential(module)


def test_a_style_applies_itself_beside_others() -> None:
    def program(rank: int) -> tuple[torch.Size, list[int]]:
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
        mesh = init_device_mesh("cpu", (2,))
        plan = {"0": Rows(), "1": ColwiseParallel()}
        parallelize_module(model, mesh, plan, src_data_rank=0)
        weight = model[0].weight
        assert isinstance(weight, DTensor)
        return model(torch.ones(5, 3)).shape, list(weight.to_local().shape)

    assert run_ranks(2, program) == [(torch.Size([5, 2]), [2, 3])] * 2


def test_what_a_style_returns_takes_the_modules_place() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1,))
        model = nn.Sequential(nn.Linear(2, 2))
        assert parallelize_module(model, mesh, {"0": Wrapped()}) is model
        assert isinstance(model[0], nn.Sequential)
        assert model(torch.ones(1, 2)).shape == (1, 2)
        assert isinstance(parallelize_module(nn.Linear(2, 2), mesh, Wrapped()), nn.Sequential)

    run_ranks(1, program)


def test_a_style_that_says_nothing_is_refused() -> None:
    class Nothing(ParallelStyle):
        pass

    class NoModule(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
            pass

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1,))
        with pytest.raises(NotImplementedError, match="Nothing lacks methods"):
            parallelize_module(nn.Linear(2, 2), mesh, Nothing())
        with pytest.raises(TypeError, match="must return the module"):
            parallelize_module(nn.Linear(2, 2), mesh, NoModule())

    run_ranks(1, program)
