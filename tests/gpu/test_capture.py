"""Captured and compiled steps on CUDA: the same losses as the step itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tilework.distributed as dist
from tests.gpu.small_models import WAYS, WIDTH, inputs, make
from tests.gpu.world import ONE, TWO, Checks, Place, World, in_worlds, require_device, run_checks
from tilework.dtensor import capture, distribute_tensor

require_device()
CHECKS = Checks()
STEPS = 6


@in_worlds(ONE, TWO)
def test_capture(world: World, tmp_path: Path) -> None:
    run_checks(__name__, world, tmp_path)


def losses(
    place: Place, way: str, backend: str | None, dropout: float = 0.0, **settings: Any
) -> list[float]:
    model = make(place, way, dropout)
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


@CHECKS(*WAYS)
def captured(place: Place, way: str) -> None:
    assert losses(place, way, "python") == losses(place, way, None)


@CHECKS("fused", "foreach", "capturable")
def captured_optimizers(place: Place, name: str) -> None:
    if name == "capturable" and not place.cuda:
        return
    settings = {name: True}
    assert losses(place, "fsdp", "python", **settings) == losses(place, "fsdp", None, **settings)


@CHECKS("dtensor", "fsdp", "plan")
def captured_dropout(place: Place, way: str) -> None:
    assert losses(place, way, "python", 0.5) == losses(place, way, None, 0.5)


@CHECKS(False, True)
def captured_collectives(place: Place, later: bool) -> None:
    def step(y: Tensor) -> Tensor:
        z = y * 2
        work: Any = dist.all_reduce(z, async_op=later)
        if later:
            work.wait()
        return z + 1

    check_numbers(place, step, 2 * place.size)


@CHECKS()
def captured_collectives_on_a_tensor_that_stays(place: Place) -> None:
    x = torch.ones(64, device=place.device)

    def step(y: Tensor) -> Tensor:
        dist.all_reduce(x)
        x.div_(place.size)
        return y + x

    check_numbers(place, step, 1)


def check_numbers(place: Place, step: Callable[[Tensor], Tensor], factor: int) -> None:
    """Fail unless the captured step of a number is a multiple of it, and one more."""
    fast = capture(step)
    for number in range(5):
        found = fast(torch.full((64,), float(number), device=place.device))
        assert found.device.type == place.kind
        assert bool((found == number * factor + 1).all()), found[:4]


@CHECKS()
def captured_autocast(place: Place) -> None:
    model = make(place, "plan")

    def step(x: Tensor) -> Tensor:
        with torch.autocast(place.kind, torch.bfloat16), torch.no_grad():
            y: Tensor = model(x)
        return y

    fast = capture(step)
    for number in range(4):
        x = inputs(place, "plan", number)
        assert torch.equal(fast(x), step(x))


@CHECKS()
def captured_sizes(place: Place) -> None:
    model = make(place, "dtensor")

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            y: Tensor = model(x).sum(1)
        return y

    fast = capture(step)
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rows in (4, 4, 6, 8, 10, 12):
            x = distribute_tensor(torch.ones(rows, WIDTH, device=place.device), place.mesh())
            found: Any = fast(x)
            assert torch.equal(found.full_tensor(), step(x).full_tensor())  # type: ignore[attr-defined]
