"""A stage whose process is killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from torch.nn import functional as F

from tests.parallel.pipelines.models import batch, seeded, stages_of
from tilework.errors import PeerLostError
from tilework.launch import spawn
from tilework.parallel import Schedule


def _dies(rank: int) -> str:
    stages = stages_of(seeded(), Schedule.one_forward_one_backward(3, 4))
    x, target = batch()
    stages.step(x, target=target, loss=F.mse_loss)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        stages.step(x, target=target, loss=F.mse_loss)
    except PeerLostError as error:
        return f"{'1' in str(error)} {time.monotonic() - began < 40}"
    return "nothing was raised"


def watch(rank: int, folder: str) -> None:
    (Path(folder) / str(rank)).write_text(_dies(rank))


def test_ranks_that_are_left_name_a_killed_stage(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"rank 1|SIGKILL"):
        spawn(watch, (str(tmp_path),), nprocs=3, start="spawn")
    left = {each.name: each.read_text() for each in tmp_path.iterdir()}
    assert left == {"0": "True True", "2": "True True"}
