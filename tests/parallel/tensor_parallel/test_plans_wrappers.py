"""Layers of a plan in modules that wrap them, as adapters do, before the plan and after it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tests.parallel.tensor_parallel.plain_modules import check_gradients
from tests.tables import each
from tilework.dtensor import init_device_mesh
from tilework.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tilework.testing import run_ranks

PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Adapted(nn.Module):
    """A layer, and a product of two small layers beside it, scaled by the norms of their sum."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        self.a = nn.Linear(layer.in_features, 2, bias=False)
        self.b = nn.Linear(2, layer.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        found: Tensor = self.layer.weight
        return found

    def forward(self, x: Tensor) -> Tensor:
        norms = (self.weight + self.b.weight @ self.a.weight).norm(dim=1).detach()
        result: Tensor = (self.layer(x) + self.b(self.a(x))) / norms
        return result


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        return self.down(self.up(x).relu())


def _wrap(model: Any, adapters: list[Adapted]) -> Any:
    for name, adapter in zip(("up", "down"), adapters, strict=True):
        adapter.layer = getattr(model, name)
        setattr(model, name, adapter)
    return model


@each("when", ["before the plan", "after the plan", "before a copy"])
def test_a_wrapped_layer_is_that_of_one_process(when: str) -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(3, 4)
    adapters = [Adapted(model.up), Adapted(model.down)]
    plain = _wrap(copy.deepcopy(model), copy.deepcopy(adapters))
    plain(x).square().sum().backward()

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        mine, own = copy.deepcopy(model), copy.deepcopy(adapters)
        if when == "before the plan":
            _wrap(mine, own)
        parallelize_module(mine, mesh, PLAN)
        if when != "before the plan":
            _wrap(mine, own)
        if when == "before a copy":
            mine = copy.deepcopy(mine)
        found = mine(x)
        assert type(found) is Tensor
        torch.testing.assert_close(found, plain(x))
        loss: Any = found.square().sum()
        loss.backward()
        check_gradients(mine, plain)

    run_ranks(2, program)


def test_a_layer_that_is_unwrapped_is_parallel_again() -> None:
    torch.manual_seed(0)
    model, x = Model(), torch.randn(3, 4)
    expected = model(x)

    def program(rank: int) -> None:
        mine = copy.deepcopy(model)
        wrapped = _wrap(mine, [Adapted(mine.up), Adapted(mine.down)])
        parallelize_module(wrapped, init_device_mesh("cpu", (2,)), PLAN)
        wrapped(x)
        for name in ("up", "down"):
            setattr(wrapped, name, getattr(wrapped, name).layer)
        torch.testing.assert_close(wrapped(x), expected)
        assert type(wrapped.up(x)) is not Tensor  # a part

    run_ranks(2, program)
