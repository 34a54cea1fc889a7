"""The resident peak of real ranks beside the peak that a plan counts.

    tilework run -n 2 benchmarks/resident.py

A rank's resident memory is that of Python, torch and tilework once the job has started, plus the
peak that is counted, plus what allocators and libraries take beside tensors: the error.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import tilework.distributed as dist
from tilework.parallel import DistributedDataParallel, fully_shard
from tilework.plan import pretend

WIDTH, LAYERS, ROWS = 2048, 6, 1024


def _model() -> nn.Sequential:
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))
    return nn.Sequential(*blocks)


def _steps(model: nn.Module, cast: bool = False) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            loss = model(torch.randn(ROWS, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp() -> None:
    _steps(DistributedDataParallel(_model()))


def sharded() -> None:
    model = _model()
    for block in model:
        fully_shard(block)
    _steps(fully_shard(model))


def mixed() -> None:
    _steps(DistributedDataParallel(_model()), cast=True)


PROGRAMS: tuple[Callable[[], None], ...] = (ddp, sharded, mixed)


def _megabytes(name: str) -> float:
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"{name}:\s+(\d+) kB", text)
    assert found is not None
    return int(found[1]) / 1000


def main() -> None:
    """Each program in turn, on this rank; the plan of each, on rank 0."""
    dist.init_process_group()
    _steps(nn.Linear(WIDTH, 4))  # libraries load
    ranks = dist.get_world_size()
    for program in PROGRAMS:
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far
        before = _megabytes("VmRSS")
        program()
        real = _megabytes("VmHWM")
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"{program.__name__}: resident {real:.0f} MB, {before:.0f} MB of it before")
    dist.destroy_process_group()
    for program in PROGRAMS:
        with pretend(ranks=ranks) as job:
            print(f"{program.__name__}: counted {job.run(program).worst.peak.bytes / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
