"""Traced jobs, made of calls or written by hand."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tilework.distributed as dist
from tilework.inspect import Seen, trace
from tilework.testing import run_ranks


def traced(
    folder: Path, step: Callable[[int], object], ranks: int = 4, steps: int = 20, **how: Any
) -> Seen:
    """The trace of ranks that call ``step(rank)`` some times."""

    def program(rank: int) -> None:
        with trace(folder):
            for _ in range(steps):
                step(rank)
            dist.barrier()

    run_ranks(ranks, program, **how)
    return Seen(folder)


def late_step(late: int) -> Callable[[int], None]:
    """A step in which rank ``late`` sleeps before the reduction."""
    x = torch.ones(100)

    def step(rank: int) -> None:
        with dist.span("forward"):
            time.sleep(0.01 if rank == late else 0.002)
        dist.all_reduce(x.clone())
        work = dist.all_reduce(x.clone(), async_op=True)
        time.sleep(0.001)
        assert work is not None
        work.wait()

    return step


#: Seconds to nanoseconds.
MS = 1_000_000


def write_rank(folder: Path, rank: int, lines: list[list[Any]], **header: Any) -> Path:
    """A rank's file: operations as in ``["o", 1, key, number, …]``, texts and a group before."""
    told = {
        "tilework_trace": 1,
        "rank": rank,
        "host": "a",
        "pid": 7,
        "job": "j",
        "clock": "c",
        "began": 0,
        "wall": 0,
        "thread": 1,
        "limits": {},
    }
    texts = ["done", "all_reduce float32 [250] SUM", "train.py:40 in f", "train.py:38 in f"]
    before = [["t", number, text] for number, text in enumerate(texts)]
    before.append(["g", 1, "default", "shm", "", [0, 1]])
    path = folder / f"rank-{rank}.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in [told | header, *before, *lines]))
    return path


def operation(number: int, entered: int, ended: int, site: int = 2) -> list[Any]:
    """The line of an all_reduce, with times in milliseconds."""
    return ["o", 1, number, number, 1, site, None, 0, entered * MS, 0, 0, ended * MS, 0, 1000]
