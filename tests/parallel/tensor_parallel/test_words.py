"""Plans in the words of Hugging Face's configurations."""

from __future__ import annotations

import copy

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
