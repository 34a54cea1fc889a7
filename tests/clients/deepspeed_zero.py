"""DeepSpeed's ZeRO, stages 1 to 3, on CPUs. DeepSpeed takes the group that exists."""

from __future__ import annotations

import os

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist

from tests.clients.program import loss_of, main, net

# Compiled for minutes at the first use, and no part of ZeRO.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def stage(number: int) -> list[float]:
    model = net()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.05),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": number},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        },
    )
    generator, seen = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(8):
        x = torch.randn(4, 8, generator=generator)
        loss = loss_of(engine, (x, x.sum(1, keepdim=True)))
        engine.backward(loss)
        engine.step()
        seen.append(loss.item())
    return seen


def train() -> list[list[float]]:
    return [stage(number) for number in (1, 2, 3)]


if __name__ == "__main__":
    main(train)
