"""Captured and compiled steps on CUDA: the same losses as the step itself."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilework.distributed as dist
from tests.gpu.small_models import LAYERS, WAYS, WIDTH, inputs, make
from tests.gpu.world import (
    LONGEST_SECONDS,
    ONE,
    TWO,
    Checks,
    Place,
    World,
    in_worlds,
    require_device,
    run_checks,
)
from tilework.dtensor import capture, distribute_tensor

require_device()
CHECKS = Checks()
STEPS = 6


def losses(
    place: Place,
    way: str,
    backend: str | None,
    dropout: float = 0.0,
    compiles: bool = False,
    layers: int = LAYERS,
    **settings: Any,
) -> list[float]:
    model: Any = make(place, way, dropout, layers)
    model = torch.compile(model) if compiles else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **settings)

    def step(x: Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mul(0.3).sin().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    run: Any = step if backend is None else capture(step, backend=backend)
    torch.manual_seed(1)
    found = []
    for number in range(STEPS):
        loss = run(inputs(place, way, number))
        found.append(float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss))
    if backend is not None:
        assert run.records, "nothing was recorded"
    return found


@CHECKS(*((way, {}) for way in WAYS), *(("fsdp", {name: True}) for name in ("fused", "foreach")))
def captured(place: Place, program: tuple[str, dict[str, bool]]) -> None:
    way, settings = program
    assert losses(place, way, "python", **settings) == losses(place, way, None, **settings)


def near(found: Sequence[float], expected: Sequence[float]) -> None:
    pairs = list(zip(found, expected, strict=True))
    assert all(abs(a - b) < 1e-3 for a, b in pairs), pairs


@CHECKS("dtensor", "fsdp", seconds=LONGEST_SECONDS)
def captured_by_inductor(place: Place, way: str) -> None:
    """Which writes Triton kernels on a GPU: to rounding."""
    near(losses(place, way, "inductor", layers=1), losses(place, way, None, layers=1))


@CHECKS("plan", "fsdp", seconds=LONGEST_SECONDS)
def compiled(place: Place, way: str) -> None:
    near(losses(place, way, None, compiles=True, layers=1), losses(place, way, None, layers=1))


@CHECKS("dtensor", "fsdp", "plan")
def captured_dropout(place: Place, way: str) -> None:
    assert losses(place, way, "python", 0.5) == losses(place, way, None, 0.5)


@CHECKS()
def captured_capturable(place: Place) -> None:
    if place.cuda:
        found = [losses(place, "fsdp", backend, capturable=True) for backend in ("python", None)]
        assert found[0] == found[1]


@CHECKS("at once", "later", "on a tensor that stays")
def captured_collectives(place: Place, way: str) -> None:
    x = torch.ones(64, device=place.device)

    def step(y: Tensor) -> Tensor:
        z = x if "stays" in way else y * 2 / place.size
        work: Any = dist.all_reduce(z, async_op=way == "later")
        if work is not None:
            work.wait()
        return y + x.div_(place.size) if "stays" in way else z - y + 1

    fast = capture(step)
    for number in range(5):
        found = fast(torch.full((64,), float(number), device=place.device))
        assert found.device.type == place.kind
        assert bool((found == number + 1).all()), found[:4]


@CHECKS()
def captured_autocast_and_sizes(place: Place) -> None:
    model = make(place, "dtensor")

    def step(x: Tensor) -> Any:
        with torch.autocast(place.kind, torch.bfloat16), torch.no_grad():
            return model(x).sum(1)

    fast = capture(step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rows in (4, 4, 6, 8, 10, 12):
            x = distribute_tensor(torch.ones(rows, WIDTH, device=place.device), place.mesh())
            assert torch.equal(fast(x).full_tensor(), step(x).full_tensor())


#: Each in processes of its own: compiling takes most of the time that they have.
COMPILING = [name for name in CHECKS.table if CHECKS.seconds[name] == LONGEST_SECONDS]


@pytest.mark.parametrize("name", COMPILING)
@in_worlds(ONE, TWO)
def test_compiled(name: str, world: World, tmp_path: Path) -> None:
    run_checks(__name__, world, tmp_path, [name])


@in_worlds(ONE, TWO)
def test_captured(world: World, tmp_path: Path) -> None:
    run_checks(__name__, world, tmp_path, [name for name in CHECKS.table if name not in COMPILING])
