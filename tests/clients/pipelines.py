"""torch.distributed.pipelining: stages traced from a model, and stages made by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    SplitPoint,
    pipeline,
)

from tests.clients.program import main, net

PARTS = 4


def stages(x: Tensor) -> list[Any]:
    """This rank's stage of two: traced, and by hand. torch traces a model only once."""
    rank, cpu = dist.get_rank(), torch.device("cpu")
    split = {"2": SplitPoint.BEGINNING}
    traced = pipeline(net(), mb_args=(x.chunk(PARTS)[0],), split_spec=split)
    own = net()[:2] if rank == 0 else net()[2:]
    return [traced.build_stage(rank, cpu), PipelineStage(own, rank, 2, cpu)]


def train() -> list[Any]:
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    target, seen = x.sum(1, keepdim=True), []
    for kind in (ScheduleGPipe, Schedule1F1B):
        for stage in stages(x):
            schedule = kind(stage, PARTS, loss_fn=nn.functional.mse_loss)
            losses: list[Tensor] = []
            if dist.get_rank() == 0:
                schedule.step(x)
            else:
                schedule.step(target=target, losses=losses)
            grads = [p.grad.sum().item() for p in stage.submod.parameters() if p.grad is not None]
            seen.append([[loss.item() for loss in losses], grads])
    return seen


if __name__ == "__main__":
    main(train)
