"""The resident peak of real ranks beside the peak that a plan counts.

    tilework run -n 2 benchmarks/resident.py ddp --width 2048
    MALLOC_MMAP_THRESHOLD_=131072 tilework run -n 2 benchmarks/resident.py ddp

The second returns each freed tensor to the system at once: the rest is no tensor. A rank's
resident memory is that of Python, torch and tilework once the job has started, plus the peak that
is counted, plus what allocators and libraries take beside tensors: the error.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

import tilework.distributed as dist
from tilework.parallel import DistributedDataParallel, fully_shard
from tilework.plan import pretend

LAYERS = 6


def _model(width: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(LAYERS))
    )


def _steps(model: nn.Module, rows: int, cast: bool = False) -> None:
    width = next(model.parameters()).shape[-1]
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            loss = model(torch.randn(rows, width)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp(width: int, rows: int) -> None:
    _steps(DistributedDataParallel(_model(width)), rows)


def sharded(width: int, rows: int) -> None:
    model = _model(width)
    for block in model:
        fully_shard(block)
    _steps(fully_shard(model), rows)


def mixed(width: int, rows: int) -> None:
    _steps(DistributedDataParallel(_model(width)), rows, cast=True)


PROGRAMS: dict[str, Callable[[int, int], None]] = {
    each.__name__: each for each in (ddp, sharded, mixed)
}


def _megabytes(name: str) -> float:
    text = Path("/proc/self/status").read_text()
    found = re.search(rf"{name}:\s+(\d+) kB", text)
    assert found is not None
    return int(found[1]) / 1000


def main() -> None:
    """A program on this rank, and the plan of it on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", choices=list(PROGRAMS))
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=1024)
    options = parser.parse_args()
    program = partial(PROGRAMS[options.program], options.width, options.rows)
    dist.init_process_group()
    _steps(nn.Linear(options.width, options.width), 64)  # libraries load
    rank, ranks = dist.get_rank(), dist.get_world_size()
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far
    before = _megabytes("VmRSS")
    program()
    peak, shared = _megabytes("VmHWM") - before, _megabytes("RssShmem")
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        with pretend(ranks=ranks) as job:
            counted = job.run(program).worst.peak.bytes / 1e6
        print(
            f"{options.program}, {options.width} wide, {ranks} ranks: {before:.0f} MB before, then "
            f"{peak:.0f} MB, of it {shared:.0f} shared; counted {counted:.0f} MB: "
            f"{peak / counted - 1:+.0%}"
        )


if __name__ == "__main__":
    main()
