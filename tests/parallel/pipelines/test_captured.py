"""Stages as programs, also with backwards that are cut in two, beside one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parallel.pipelines.models import alone, assert_equal, batch, seeded, stages_of, together
from tests.parallel.pipelines.orders import legal_rows
from tests.parallel.pipelines.test_schedule import of_torch
from tests.parallel.pipelines.test_stages import Tied
from tests.parallel.pipelines.test_stages_wrapped import TENSOR_PLAN, full
from tilework.errors import CaptureError
from tilework.mesh import init_device_mesh
from tilework.parallel import (
    DistributedDataParallel,
    Schedule,
    apply_activation_checkpointing,
    fully_shard,
    parallelize_module,
    pipeline,
)
from tilework.testing import run_ranks

H1, V = Schedule.zero_bubble, Schedule.v
H2 = partial(Schedule.zero_bubble, variant="H2")
one_f_one_b = Schedule.one_forward_one_backward
Grads = dict[str, Tensor | None]


def losses_and_grads(plan: Schedule, **options: Any) -> list[tuple[set[float], Grads]]:
    """Of three steps, which run as they are, are recorded, and run as programs."""

    def program(rank: int) -> list[tuple[float, Grads]]:
        stages, (x, target) = stages_of(seeded(), plan, capture="python", **options), batch(11)
        found = []
        for _ in range(3):
            stages.zero_grad()
            loss = stages.step(x, target=target, loss=F.mse_loss)
            found.append((loss.item(), {name: p.grad for name, p in stages.named_parameters()}))
        return found

    every = zip(*run_ranks(plan.ranks, program), strict=True)
    return [({loss for loss, _ in step}, together(each for _, each in step)) for step in every]


@pytest.mark.parametrize("make", [Schedule.gpipe, one_f_one_b, Schedule.interleaved, H1, H2, V])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 1), (2, 9), (3, 4), (4, 2)])
def test_captured_steps_have_the_bits_of_one_process(
    make: Any, ranks: int, microbatches: int
) -> None:
    loss, expected = alone(microbatches, rows=11)
    for losses, grads in losses_and_grads(make(ranks, microbatches)):
        assert losses == {loss}
        assert_equal(grads, expected)


@pytest.mark.parametrize("seed", range(6))
def test_random_orders_with_halves_train_like_one_process(seed: int) -> None:
    plan = Schedule.of_actions(legal_rows(seed, split=True))
    expected = alone(plan.microbatches, rows=11)[1]
    for _, grads in losses_and_grads(plan):
        torch.testing.assert_close(grads, expected)


def test_torchs_order_of_dual_pipe_v_trains_like_one_process() -> None:
    expected = alone(4, rows=11)[1]
    for _, grads in losses_and_grads(Schedule.from_torch(of_torch("ScheduleDualPipeV", 2, 4, 2))):
        torch.testing.assert_close(grads, expected)


def test_a_backward_in_two_without_capture_is_refused() -> None:
    with pytest.raises(ValueError, match="only captured stages can be cut"):
        run_ranks(2, lambda _: stages_of(seeded(), H1(2, 2)))


class Chain(nn.Module):
    """Layers between a first and a last one; the result has a part that the loss leaves out."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.layers = nn.ModuleList(layer() for _ in range(4))
        self.last, self.aside = nn.Linear(4, 2), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x), self.aside(x)


class Recurrent(nn.LSTM):
    def __init__(self) -> None:
        super().__init__(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        result: Tensor = super().forward(x[:, None])[0][:, 0]
        return result


def _dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.4), nn.ReLU(inplace=True))


def _normal() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())


def _frozen() -> nn.Module:
    return nn.Linear(4, 4).requires_grad_(False)


def trained(plan: Schedule, layer: Any, capture: Any, change: Any = None) -> list[Any]:
    """Losses, gradients, buffers, parameters and a result of steps with batches of two lengths."""

    def program(rank: int) -> list[Any]:
        kind, split = (Tied, ["b"]) if layer is Tied else (lambda: Chain(layer), "even")
        stages, found = stages_of(seeded(kind), plan, split, capture=capture), []
        for part in stages.parts if change is not None else ():
            change(part)
        torch.manual_seed(rank)
        optimizer = torch.optim.SGD(stages.parameters(), lr=0.1, momentum=0.9)
        for number in range(5):
            x, target = batch(11 if number == 3 else 8)
            if number != 2:
                optimizer.zero_grad()
            loss = stages.step(x, target=target, loss=lambda y, t: F.mse_loss(_first(y), t))
            grads = {name: p.grad for name, p in stages.named_parameters()}
            optimizer.step()
            found += [loss, {n: None if x is None else x.clone() for n, x in grads.items()}]
        return [*found, stages.state_dict(), stages.evaluate(x)]

    return run_ranks(plan.ranks, program)


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def whole(plan: Schedule) -> Schedule:
    """The order with whole backwards in the places of input gradients."""
    rows = [[a for a in row if a.kind != "weights"] for row in plan.actions]
    return Schedule.of_actions(
        [
            [a._replace(kind="backward") if a.kind == "input_gradient" else a for a in row]
            for row in rows
        ]
    )


@pytest.mark.parametrize("layer", [_dropping, _normal, _frozen, Recurrent, Tied])
def test_halves_train_as_whole_backwards(layer: Any) -> None:
    plan = H1(2, 3)
    got = trained(plan, layer, "python")
    torch.testing.assert_close(got, trained(whole(plan), layer, None), rtol=0, atol=0)


def test_captured_stages_train_under_autocast() -> None:
    def program(rank: int, capture: Any) -> list[Tensor]:
        stages, (x, target) = stages_of(seeded(), one_f_one_b(2, 3), capture=capture), batch()
        with torch.autocast("cpu", torch.bfloat16):
            losses = [stages.step(x, target=target, loss=F.mse_loss) for _ in range(3)]
        return [*losses, *(p.grad for p in stages.parameters())]

    got, expected = run_ranks(2, program, "python"), run_ranks(2, program, None)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def _recomputing(part: nn.Module) -> None:
    apply_activation_checkpointing(part, {nn.Sequential})


def test_halves_train_as_whole_backwards_where_stages_recompute() -> None:
    got = trained(H1(2, 3), _dropping, "python", _recomputing)
    expected = trained(whole(H1(2, 3)), _dropping, None, _recomputing)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_captured_stages_that_write_to_buffers_in_backward_are_refused() -> None:
    with pytest.raises(CaptureError, match="writes to a tensor from outside"):
        trained(one_f_one_b(2, 3), _normal, "python", _recomputing)


@pytest.mark.parametrize("kind", ["tp", "dp"])
def test_wrapped_stages_train_as_whole_backwards(kind: str) -> None:
    def program(rank: int, plan: Schedule, capture: Any) -> list[Tensor]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", kind))
        stages = pipeline(seeded(), mesh["pp"], schedule=plan, capture=capture)
        for part in stages.parts if kind == "tp" else ():
            parallelize_module(part, mesh["tp"], TENSOR_PLAN)
        if kind == "dp":
            stages.parts[:] = [
                DistributedDataParallel(p, device_mesh=mesh["dp"]) for p in stages.parts
            ]
        for _ in range(3):
            stages.zero_grad()
            stages.step(batch()[0] + rank // 2, target=batch()[1], loss=F.mse_loss)
        return [full(p.grad) for p in stages.parameters()]

    got = run_ranks(4, program, H1(2, 3), "python")
    expected = run_ranks(4, program, whole(H1(2, 3)), None)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_captured_stages_that_are_sharded_are_refused() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
        stages = pipeline(seeded(), mesh["pp"], schedule=one_f_one_b(2, 2), capture="python")
        for part in stages.parts:
            fully_shard(part, mesh=mesh["dp"])
        stages.step(batch()[0], target=batch()[1], loss=F.mse_loss)

    with pytest.raises(ValueError, match="fully_shard has sharded it"):
        run_ranks(2, program)
