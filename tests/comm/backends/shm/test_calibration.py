"""The calibration of a host: measured once, kept, and never trusted blindly."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tilework.distributed as dist
from tilework.comm.backend import DistributedBackendOptions, core_error
from tilework.comm.backends.shm import calibration, shm_backend
from tilework.comm.backends.shm.calibration import group_tunables, host_calibration, plan_for
from tilework.cores import Topology
from tilework.testing import run_ranks

if core_error() is not None:
    pytest.skip("calibrates the core", allow_module_level=True)

from tilework import _core

MEASURED = {**_core.DEFAULT_TUNABLES, "chunk_bytes": 131072}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """An empty cache folder, and a core that measures at once; one entry for each time it does."""
    measured: list[int] = []

    def calibrate(cpus: list[int], insists: bool) -> tuple[dict[str, int], list[Any]]:
        measured.append(1)
        return dict(MEASURED), [("all_gather", 4096, "outboxes", 1e-6)]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TILEWORK_CALIBRATION", "1")
    monkeypatch.delenv("TILEWORK_SINGLE_COPY", raising=False)
    monkeypatch.setattr(_core, "calibrate", calibrate)
    monkeypatch.setattr(calibration, "usable_cores", lambda cpus=None: 2)
    monkeypatch.setattr(calibration, "_known", {})
    return measured


def files() -> list[Path]:
    return list(calibration.cache_folder().glob("*.json"))


def test_a_host_is_measured_once(runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    first = host_calibration()
    assert first.origin.startswith("measured now, kept in ")
    assert host_calibration() is first
    monkeypatch.setattr(calibration, "_known", {})  # as another process
    again = host_calibration()
    assert again.origin.startswith("kept in ")
    assert (again.tunables, again.measurements) == (MEASURED, first.measurements)
    assert len(runs) == 1
    host_calibration(remake=True)
    assert len(runs) == 2


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\0\xff" * 100,
        b"[" * 60_000,
        b"[]",
        b'{"tunables": {}, "measurements": [], "facts": {}}',
        json.dumps({"tunables": {**MEASURED, "chunk_bytes": -1}, "measurements": []}).encode(),
        json.dumps({"tunables": {**MEASURED, "chunk_bytes": True}, "measurements": []}).encode(),
        json.dumps({"tunables": MEASURED, "measurements": [], "facts": {}}).encode(),
    ],
)
def test_garbage_is_measured_again(
    runs: list[int], garbage: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    host_calibration()
    (path,) = files()
    path.write_bytes(garbage)
    monkeypatch.setattr(calibration, "_known", {})
    assert host_calibration().tunables == MEASURED
    assert len(runs) == 2
    assert json.loads(path.read_bytes())["tunables"] == MEASURED


def test_another_kernel_is_another_host(runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    host_calibration()
    facts = {**calibration.host_facts(), "kernel": "7.0"}
    monkeypatch.setattr(calibration, "host_facts", lambda cpus: facts)
    host_calibration()
    assert (len(runs), len(files())) == (2, 2)


def test_nowhere_to_keep_it(
    runs: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no folder can be made in there
    assert host_calibration().origin.startswith("measured now, not kept: Not a directory")
    assert host_calibration().tunables == MEASURED
    assert len(runs) == 1  # this process knows


def test_it_can_be_turned_off(runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWORK_CALIBRATION", "off")
    assert host_calibration().tunables == _core.DEFAULT_TUNABLES
    assert (runs, files()) == ([], [])


def test_writers_at_the_same_time_leave_a_whole_file(runs: list[int]) -> None:
    threads = [threading.Thread(target=host_calibration, kwargs={"remake": True}) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (path,) = files()
    assert json.loads(path.read_bytes())["tunables"] == MEASURED
    assert not list(path.parent.glob("*.new"))


def test_one_process_measures_at_a_time(runs: list[int]) -> None:
    path = calibration.cache_folder() / "calibration-x.json"
    with calibration._alone(path) as first, calibration._alone(path) as second:
        assert (first, second) == (True, False)


def test_the_single_copy_can_be_asked_for(runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    assert group_tunables() == MEASURED
    monkeypatch.setenv("TILEWORK_SINGLE_COPY", "auto")
    assert group_tunables() == MEASURED
    monkeypatch.setenv("TILEWORK_SINGLE_COPY", "1")
    monkeypatch.setitem(MEASURED, "single_copy_below_bytes", 131072)
    wanted = group_tunables()
    assert wanted["single_copy_bytes"] == wanted["single_copy_message_bytes"] == 65536
    assert wanted["single_copy_below_bytes"] == _core.NEVER_BYTES
    monkeypatch.setenv("TILEWORK_SINGLE_COPY", "0")
    assert group_tunables()["thread_copy_bytes"] == _core.NEVER_BYTES


def test_ranks_that_share_cores_read_later(
    runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("single_copy_bytes", "single_copy_reduce_bytes"):
        monkeypatch.setitem(MEASURED, name, 65536)
    monkeypatch.setitem(MEASURED, "single_copy_below_bytes", 131072)
    assert group_tunables(2) == MEASURED
    crowded = group_tunables(3)
    assert crowded["single_copy_bytes"] == 4 * 65536
    assert crowded["single_copy_rooted_bytes"] == _core.NEVER_BYTES
    assert crowded["single_copy_below_bytes"] == 131072  # the range is empty
    assert crowded["single_copy_reduce_bytes"] == _core.NEVER_BYTES
    assert crowded["slow_outbox_ns"] == MEASURED["slow_outbox_ns"]  # some peers are on other cores


def test_chunks_fit_into_caches_that_ranks_share() -> None:
    def chunks(ranks: int, second_level_bytes: int, measured: bool) -> tuple[int, int]:
        threads = tuple(frozenset({core, core + 2}) for core in range(2))
        plan = plan_for(Topology((frozenset(range(4)),), threads, second_level_bytes), ranks)
        times = (("all_gather", 4096, "outboxes", 1e-6),) if measured else ()
        known = calibration.Calibration(MEASURED, times, "")
        tunables = calibration.chunks_for(plan, known)
        return tunables["chunk_bytes"], tunables["reduce_chunk_bytes"]

    kib = 1024
    assert chunks(2, 1024 * kib, measured=True) == (128 * kib, 512 * kib)
    assert chunks(4, 1024 * kib, measured=True) == (64 * kib, 256 * kib)
    assert chunks(8, 1024 * kib, measured=True) == (128 * kib, 512 * kib)  # by turns
    assert chunks(2, 256 * kib, measured=True) == (128 * kib, 512 * kib)
    assert chunks(2, 256 * kib, measured=False) == (128 * kib, 128 * kib)
    assert chunks(4, 256 * kib, measured=False) == (64 * kib, 64 * kib)
    assert chunks(4, 0, measured=False) == (64 * kib, 256 * kib)


def test_one_core_is_not_measured(runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "usable_cores", lambda cpus=None: 1)  # a CPU quota, too
    assert host_calibration().origin == "not measured: that takes two cores"
    assert (runs, files()) == ([], [])


def test_disturbed_measurements_are_not_kept(
    runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def calibrate(cpus: list[int], insists: bool) -> tuple[dict[str, int], list[Any]]:
        raise RuntimeError("other programs kept taking the cores")

    monkeypatch.setattr(_core, "calibrate", calibrate)
    assert host_calibration().origin == "not measured: other programs kept taking the cores"
    assert host_calibration().tunables == _core.DEFAULT_TUNABLES
    assert files() == []


def test_all_ranks_use_the_same(runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWORK_SINGLE_COPY", "auto")

    def program(rank: int) -> dict[str, int]:
        dist.all_reduce(torch.ones(2))
        group: Any = dist.get_default_group()
        return dict(group.engine.group.tunables())

    assert run_ranks(2, program, backend="shm") == [MEASURED, MEASURED]


def test_ranks_bound_to_a_core_each_have_one_each(
    runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group of theirs is measured on the cores of all, and not taken for a crowded one."""
    measured_on: list[list[int]] = []

    def affinity() -> frozenset[int]:
        return frozenset({5 + dist.get_rank()} if dist.is_initialized() else {0})

    def calibrate(cpus: list[int], insists: bool) -> tuple[dict[str, int], list[Any]]:
        measured_on.append(cpus)
        return {**MEASURED, "slow_outbox_ns": 12345}, []

    def program(rank: int) -> int:
        group: Any = dist.new_group([0, 1])
        return int(group.engine.group.tunables()["slow_outbox_ns"])

    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(shm_backend, "affinity", affinity)
    monkeypatch.setattr(calibration, "usable_cores", lambda cpus=None: len(cpus or ()))
    monkeypatch.setattr(_core, "calibrate", calibrate)
    assert run_ranks(2, program, backend="shm") == [12345, 12345]
    assert measured_on == [[5, 6]]


def test_ranks_have_loaded_before_it_measures(
    runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    came: list[int] = []
    came_before: list[int] = []
    join = shm_backend._join

    def join_late(request: DistributedBackendOptions) -> Any:
        time.sleep(0.3)
        came.append(request.group_rank)
        return join(request)

    def calibrate(cpus: list[int], insists: bool) -> tuple[dict[str, int], list[Any]]:
        came_before.extend(came)
        return dict(MEASURED), []

    monkeypatch.setattr(shm_backend, "_join", join_late)
    monkeypatch.setattr(_core, "calibrate", calibrate)
    run_ranks(2, lambda rank: None, backend="shm")
    assert came_before == [1]


def test_the_core_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWORK_SINGLE_COPY", raising=False)
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("takes two cores")
    tunables, measurements = _core.calibrate(cpus, insists=True)
    assert set(tunables) == set(_core.DEFAULT_TUNABLES)
    assert tunables["threads_apart"] == 0
    assert {way for _, _, way, _ in measurements} >= {"outboxes", "chunks", "cached stores"}
    assert {operation for operation, *_ in measurements} >= {"all_gather", "send_recv"}
    for name, size in tunables.items():
        if name.startswith("single_copy") and "below" not in name:
            assert size < tunables[calibration.below(name)] or size == _core.NEVER_BYTES
    assert tunables["slow_outbox_ns"] < 1e9
    assert all(seconds > 0 for *_, seconds in measurements)
    assert len(os.sched_getaffinity(0)) >= 1
