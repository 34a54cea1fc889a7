"""Steps on CUDA compiled by Inductor, which writes Triton kernels there: losses to rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.small_models import inputs, make
from tests.gpu.world import (
    LONGEST_SECONDS,
    ONE,
    TWO,
    Checks,
    Place,
    World,
    close,
    in_worlds,
    require_device,
    run_checks,
)
from tilework.dtensor import capture

require_device()
CHECKS = Checks()


def losses(place: Place, way: str, backend: str | None) -> list[float]:
    model = make(place, way, layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mul(0.3).sin().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run: Any = step if backend is None else capture(step, backend=backend)
    found = [run(inputs(place, way, number)) for number in range(4)]
    return [float(x.full_tensor() if hasattr(x, "full_tensor") else x) for x in found]


@CHECKS("dtensor", "fsdp", seconds=LONGEST_SECONDS)
def captured(place: Place, way: str) -> None:
    found, expected = losses(place, way, "inductor"), losses(place, way, None)
    assert all(abs(a - b) < 1e-3 for a, b in zip(found, expected, strict=True)), (found, expected)


@CHECKS("plan", "fsdp", seconds=LONGEST_SECONDS)
def compiled(place: Place, way: str) -> None:
    plain, model = make(place, way, layers=1), make(place, way, layers=1)
    fast: Any = torch.compile(model)
    for number in range(4):
        x = inputs(place, way, number)
        a: Any
        b: Any
        a, b = plain(x).square().mean(), fast(x).square().mean()
        a.backward()
        b.backward()
        assert abs(float(a) - float(b)) < 1e-4
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        close(one.grad, other.grad, 1e-3)


@pytest.mark.parametrize("name", CHECKS.table)
@in_worlds(ONE, TWO)
def test_inductor(name: str, world: World, tmp_path: Path) -> None:
    """Each in processes of its own: compiling takes most of the time that they have."""
    run_checks(__name__, world, tmp_path, name)
