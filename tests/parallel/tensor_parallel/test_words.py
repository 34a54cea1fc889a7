"""Plans in the words of Hugging Face's configurations."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tilework.dtensor import DTensor
from tilework.mesh import init_device_mesh
from tilework.parallel import parallelize_module
from tilework.testing import run_ranks


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.arange(8.0).view(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.up.T


class Outputs(NamedTuple):
    value: Tensor
    others: dict[str, Tensor]


class Returning(Product):
    def forward(self, x: Tensor) -> Any:
        y = x @ self.up.T
        return Outputs(y, {"twice": y * 2})


def test_every_output_of_experts_is_whole() -> None:
    plan = {"": "moe_tp_experts", "up": "colwise"}

    def program(rank: int) -> None:
        model = parallelize_module(Returning(), init_device_mesh("cpu", (2,)), plan)
        found, wanted = model(torch.ones(1, 2)), Returning()(torch.ones(1, 2))
        assert type(found) is Outputs
        assert not isinstance(found.value, DTensor)
        assert torch.equal(found.value, wanted.value)
        assert torch.equal(found.others["twice"], wanted.others["twice"])

    run_ranks(2, program)


def test_copies_of_a_module_with_local_params_compute_with_local_tensors() -> None:
    plan = {"0": "local_params", "0.up": "colwise"}

    def program(rank: int) -> None:
        model = nn.Sequential(Product())
        parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
        wanted = torch.ones(1, 2) @ Product().up.T.chunk(2, 1)[rank]
        for each in (model, copy.deepcopy(model)):
            found = each(torch.ones(1, 2))
            assert not isinstance(found, DTensor)
            assert torch.equal(found, wanted)

    run_ranks(2, program)
