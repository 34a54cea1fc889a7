"""What ranks run in tests of spawn(), without torch, which takes seconds to load."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def write_environment(rank: int, folder: Path) -> None:
    names = ("RANK", "WORLD_SIZE", "TILEWORK_BACKEND", "TILEWORK_TIMEOUT")
    text = " ".join([str(rank), *(os.environ[name] for name in names)])
    (folder / f"rank-{rank}").write_text(text)


def fail_at(rank: int, where: int, folder: Path) -> None:
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    if rank == where:
        raise ValueError(f"at rank {rank}")
    time.sleep(60)


def end_by(rank: int, how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "exit":
        sys.exit(5)


def leave_at(rank: int, where: int) -> None:
    if rank == where:
        os._exit(3)
    time.sleep(60)


def wait(rank: int, folder: Path) -> None:
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    time.sleep(60)


def check_size(rank: int, data: bytes) -> None:
    assert len(data) == 1 << 20


def stop_on_one(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def return_tensor(rank: int, factor: int) -> torch.Tensor | None:
    import torch

    return torch.full((2,), rank * factor) if rank else None
