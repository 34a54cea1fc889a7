"""The memory that a step of fully_shard takes, measured, against what the method needs."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import tilework.distributed as dist
from tests.parallel.data_parallel.test_bucket_memory import private_bytes
from tilework.parallel import fully_shard
from tilework.testing import run_ranks

LAYERS, SIZE, RANKS = 6, 2048, 2


def used_bytes() -> int:
    group: Any = dist.get_default_group()
    return private_bytes() + int(group.engine.group.arena().used_bytes())


def measure(rank: int) -> tuple[float, float]:
    """What is held after construction, and the most in a step: in bytes of a full layer."""
    mallopt: Any = ctypes.CDLL(None).mallopt
    mallopt(-3, 1 << 16)  # freed memory goes back to the system at once, and is not counted
    torch.set_num_threads(1)
    before, layer = used_bytes(), SIZE * SIZE * 4
    model: Any = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS)))
    for each in (*model, model):
        fully_shard(each)
    constructed = (used_bytes() - before) / layer
    peaks: list[int] = []
    for _ in range(3):
        model.zero_grad()
        seen, done = [0], threading.Event()

        def watch(seen: list[int] = seen, done: threading.Event = done) -> None:
            while not done.is_set():
                seen[0] = max(seen[0], used_bytes() - before)
                time.sleep(0.0002)

        watcher = threading.Thread(target=watch)
        watcher.start()
        x = torch.ones(4, SIZE)
        torch.autograd.backward(F.mse_loss(model(x), x))
        done.set()
        watcher.join()
        peaks.append(seen[0])
    return constructed, max(peaks[1:]) / layer


def test_a_step_holds_shards_and_four_times_a_layer() -> None:
    """Parameters of two layers, the gradient of one, and the buffer of one collective."""
    shards = LAYERS / RANKS
    for constructed, peak in run_ranks(RANKS, measure, kind="processes"):
        assert constructed < 1.05 * shards
        assert peak < 1.1 * (2 * shards + 4)
