"""How far a call travels: ``python -m tests.dtensor.trips`` prints the modules that it enters.

Rooms are the modules of tilework that a call enters; returns are the moves from one module to
another, less the rooms. One rank of two is traced.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import tilework
from tilework.dtensor import Shard, distribute_tensor, init_device_mesh
from tilework.testing import run_ranks

_ROOT = str(Path(tilework.__file__).parent)


class Trip:
    """The modules that Python enters, in order, while this is the profiler."""

    def __init__(self) -> None:
        self.entered: list[str] = []

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(_ROOT):
            self.entered.append(path)

    def __str__(self) -> str:
        moves = sum(a != b for a, b in zip(["", *self.entered], self.entered, strict=False))
        rooms = len({*self.entered})
        return f"{rooms} rooms, {moves - rooms} returns, {len(self.entered)} calls"


def on_rank(rank: int) -> list[str]:
    """The trips of the first and the second call of ``z = w[0]; z.add_(1)``."""
    trips = []
    mesh = init_device_mesh("cpu", (2,))
    for _ in range(2):
        w = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
        trip = Trip()
        sys.setprofile(trip if rank == 0 else None)
        z = w[0]
        z.add_(1)
        sys.setprofile(None)
        trips.append(str(trip))
    return trips


if __name__ == "__main__":
    print("z = w[0]; z.add_(1): first {}; then {}".format(*run_ranks(2, on_rank)[0]))
