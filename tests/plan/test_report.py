"""What starting costs is counted as real ranks count it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tilework.distributed as dist
import tilework.store.barrier
from tilework import checkpoint
from tilework.mesh import init_device_mesh
from tilework.plan import StartCost, pretend
from tilework.store import HashStore
from tilework.testing import run_ranks


def nothing() -> None:
    """Only the default group."""


def groups() -> None:
    size = dist.get_world_size()
    dist.new_group(range(0, size, 2))
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    mesh["tp"].get_group()


def planned(program: Callable[[], None], ranks: int, hosts: int = 2) -> StartCost:
    with pretend(ranks=ranks, hosts=hosts) as job:
        return job.run(program).kinds[0].start


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("program", [nothing, groups])
def test_requests_are_those_of_real_ranks(
    program: Callable[[], None], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    def counting(name: str) -> Any:
        original = getattr(HashStore, name)

        def call(self: HashStore, code: Any, *fields: Any) -> Any:
            seen.append(repr(fields))
            return original(self, code, *fields)

        return call

    for name in ("_do", "_send"):
        monkeypatch.setattr(HashStore, name, counting(name))
    monkeypatch.setattr(tilework.store.barrier, "_LOOK_SECONDS", 60.0)
    run_ranks(ranks, lambda rank: program())
    own = [key for key in seen if "threads/" not in key]  # the backend's own requests
    monkeypatch.undo()
    assert planned(program, ranks).requests == len(own)


@pytest.mark.parametrize("program", [nothing, groups])
def test_starting_is_linear(program: Callable[[], None]) -> None:
    small, large = planned(program, 512, 64), planned(program, 4096, 512)
    assert large.requests <= 8 * small.requests
    assert large.connections == 8 * small.connections
    assert large.most == small.most


@pytest.mark.parametrize("write", [checkpoint.save, checkpoint.async_save])
def test_checkpoints_are_in_the_report(write: Callable[..., Any], tmp_path: Path) -> None:
    def program() -> None:
        state = {"weight": torch.zeros(1000)}
        write(state, tmp_path / "saved")
        checkpoint.load(tmp_path / "saved", state)

    with pretend(ranks=2) as job:
        report = job.run(program, everyone=True)
    assert sum(each.saved for each in report.kinds) == 4000
    assert "checkpoints: " in str(report)
