"""Pipelines with data and tensor parallelism, checkpoints, captured steps, scalers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.parallel.pipelines.models import Block, batch, seeded, stages_of, together
from tilework.capture import capture
from tilework.checkpoint import load, save
from tilework.mesh import init_device_mesh
from tilework.parallel import (
    ColwiseParallel,
    DistributedDataParallel,
    MixedPrecisionPolicy,
    RowwiseParallel,
    Schedule,
    apply_activation_checkpointing,
    clip_grad_norm_,
    fully_shard,
    parallelize_module,
    pipeline,
)
from tilework.parallel.pipelines.schedule import Action
from tilework.testing import run_ranks

one_f_one_b = Schedule.one_forward_one_backward
TENSOR_PLAN = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}


def full(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach()


def expected() -> dict[str, Tensor]:
    """The parameters of one process after three clipped steps."""
    model = seeded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x, target = batch()
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(model(x), target).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def _wrap(stages: Any, mesh: Any, kinds: str) -> None:
    for part in stages.parts:
        blocks = [each for each in part.layers if isinstance(each, Block)]
        if "checkpoints" in kinds:
            apply_activation_checkpointing(part, {Block})
        if "tp" in kinds:
            parallelize_module(part, mesh["tp"], TENSOR_PLAN)
        if "fsdp" in kinds:
            for each in blocks:
                fully_shard(each, mesh=mesh["dp"])
            fully_shard(part, mesh=mesh["dp"])
    if "ddp" in kinds:
        ddp = [DistributedDataParallel(part, device_mesh=mesh["dp"]) for part in stages.parts]
        stages.parts[:] = ddp


@pytest.mark.parametrize(
    "kinds", ["tp", "ddp", "fsdp", "fsdp checkpoints", "ddp checkpoints", "fsdp tp"]
)
@pytest.mark.parametrize("plan", [one_f_one_b(2, 3), Schedule.interleaved(2, 2)], ids=["1f1b", "i"])
def test_wrapped_stages_train_as_one_process(kinds: str, plan: Schedule) -> None:
    names = ("pp", *(["dp"] if "dp" in kinds else []), *(["tp"] if "tp" in kinds else []))

    def program(rank: int) -> dict[str, Tensor]:
        mesh = init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)
        stages = pipeline(seeded(), mesh["pp"], split="even", schedule=plan)
        _wrap(stages, mesh, kinds)
        optimizer = torch.optim.AdamW(stages.parameters(), lr=0.01)
        number = mesh["dp"].get_local_rank() if "dp" in kinds else 0
        x, target = (each.chunk(2 if "dp" in kinds else 1)[number] for each in batch())
        for _ in range(3):
            optimizer.zero_grad()
            stages.step(x, target=target, loss=F.mse_loss)
            clip_grad_norm_(stages.parameters(), 0.3)
            optimizer.step()
        return {name: full(p) for name, p in stages.named_parameters()}

    got = together(run_ranks(2 ** len(names), program))
    torch.testing.assert_close(got, expected(), rtol=1e-4, atol=1e-5)


def test_gathers_and_reductions_may_be_actions() -> None:
    rows = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
    kinds: dict[str, Any] = {"F": "forward", "B": "backward"}
    plan = Schedule.of_actions(
        [
            [
                Action("gather", stage),
                *(Action(kinds[each[1]], stage, int(each[2])) for each in row),
                Action("free", stage),
                Action("reduce", stage),
            ]
            for stage, row in enumerate(rows)
        ]
    )
    test_wrapped_stages_train_as_one_process("fsdp", plan)


def _loss_of_parts(change: Any) -> list[float]:
    """The loss of a step of two stages with two replicas, whose parts ``change`` has changed."""

    def program(rank: int) -> float:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        plan = one_f_one_b(2, 2)
        stages = pipeline(seeded(), mesh["pp"], split="even", schedule=plan)
        for part in stages.parts:
            change(part, mesh["dp"])
        x, target = batch()
        return stages.step(x, target=target, loss=lambda y, t: F.mse_loss(y.float(), t)).item()

    return run_ranks(4, program)


def test_values_of_a_narrower_dtype_cross() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def change(part: Any, mesh: Any) -> None:
        for each in (*(x for x in part.layers if isinstance(x, Block)), part.first, part.last):
            if any(True for _ in each.parameters()):
                fully_shard(each, mesh=mesh, mp_policy=policy)

    got = _loss_of_parts(change)
    expected = F.mse_loss(seeded()(batch()[0]), batch()[1]).item()
    assert got == [pytest.approx(expected, rel=0.02)] * 4


def test_a_dtensor_that_would_cross_is_refused() -> None:
    columns = ColwiseParallel(use_local_output=False)
    plan = {"layers.*.up": columns, "layers.*.down": RowwiseParallel(use_local_output=False)}
    with pytest.raises(TypeError, match=r"a DTensor crosses the cut after stage 0: layers\.3"):
        _loss_of_parts(lambda part, mesh: parallelize_module(part, mesh, plan))


def test_checkpoints_of_a_pipeline_load_with_any_number_of_stages(tmp_path: Path) -> None:
    def program(rank: int, ranks: int, loads: bool) -> list[float]:
        stages = stages_of(seeded(), one_f_one_b(ranks, 2))
        optimizer = torch.optim.AdamW(stages.parameters(), lr=0.01)
        state = {"model": stages, "optimizer": optimizer}
        x, target = batch()
        losses = []
        if loads:
            load(tmp_path / "saved", state)
        for number in range(2 if loads else 4):
            if number == 2:
                save(state, tmp_path / "saved")
            optimizer.zero_grad()
            losses.append(stages.step(x, target=target, loss=F.mse_loss).item())
            optimizer.step()
        return losses[-2:]

    losses = run_ranks(2, program, 2, False)[0]
    for ranks in (1, 3):
        assert run_ranks(ranks, program, ranks, True)[0] == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize(
    ("plan", "how"), [(one_f_one_b(2, 3), None), (Schedule.zero_bubble(2, 3), "python")]
)
def test_a_captured_step_has_the_losses_of_the_step(plan: Schedule, how: Any) -> None:
    def program(rank: int, captures: bool) -> list[float]:
        stages = stages_of(seeded(), plan, capture=how)
        optimizer = torch.optim.SGD(stages.parameters(), lr=0.1)

        def step(x: Tensor, target: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = stages.step(x, target=target, loss=F.mse_loss, weight="rows")
            optimizer.step()
            return loss

        run = capture(step, check="always") if captures else step
        return [run(*batch(rows)).item() for rows in (12, 12, 12, 12, 9, 9, 9)]

    assert run_ranks(2, program, True) == run_ranks(2, program, False)


def test_a_scaler_skips_the_step_of_all_stages_where_one_overflows() -> None:
    def program(rank: int, size: float) -> tuple[float, bool]:
        stages = stages_of(seeded(), one_f_one_b(2, 2))
        optimizer = torch.optim.SGD(stages.parameters(), lr=0.1)
        before = [p.detach().clone() for p in stages.parameters()]
        scaler = torch.amp.GradScaler("cpu", init_scale=1e37)
        x, target = batch()
        loss = stages.step(x, target=target * size, loss=F.mse_loss, scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
        pairs = zip(before, stages.parameters(), strict=True)
        return loss.item(), any(not torch.equal(a, b) for a, b in pairs)

    for size, steps in ((1.0, True), (1e4, False)):
        expected = F.mse_loss(seeded()(batch()[0]), batch()[1] * size).item()
        for loss, has_stepped in run_ranks(2, program, size):
            assert loss == pytest.approx(expected)
            assert has_stepped == steps
