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
from tilework import huge_pages
from tilework.comm.backend import DistributedBackendOptions, core_error
from tilework.comm.backends.shm import calibration, shm_backend
from tilework.comm.backends.shm.calibration import group_tunables, host_calibration
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

    def calibrate(cpus: list[int], *_: object, insists: bool) -> tuple[dict[str, int], list[Any]]:
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
    assert host_calibration(remake=True).sureness == "two rounds agree"
    assert len(runs) == 3


def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Be another process, some seconds later."""
    now = time.time() + seconds
    monkeypatch.setattr(calibration, "_known", {})
    monkeypatch.setattr(time, "time", lambda: now)


def test_one_round_is_confirmed_later(runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def sureness() -> str:
        return host_calibration(before_measuring=lambda: None).sureness

    assert sureness() == "one round, not confirmed yet"
    later(monkeypatch, 60)
    assert sureness() == "one round, not confirmed yet"
    later(monkeypatch, 1000)
    assert host_calibration().sureness == "one round, not confirmed yet"  # no group is made
    later(monkeypatch, 1000)
    assert sureness() == "two rounds agree"
    later(monkeypatch, 9000)
    assert sureness() == "two rounds agree"
    assert len(runs) == 2


def test_rounds_that_differ(runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    reads = "single_copy_all_to_all"
    for rounds, (first, end) in enumerate([(65536, _core.NEVER_BYTES), (262144, 1 << 20)], 1):
        monkeypatch.setitem(MEASURED, f"{reads}_bytes", first)
        monkeypatch.setitem(MEASURED, f"{reads}_below_bytes", end)
        monkeypatch.setitem(MEASURED, "one_shot_bytes", rounds << 18)
        monkeypatch.setitem(MEASURED, "streamed_rooted_bytes", 1 << 20 << 2 * rounds)
        known = host_calibration(before_measuring=lambda: None)
        later(monkeypatch, 1000 * rounds)
    assert calibration.read_ranges(known.tunables)["all_to_all"] == (262144, 1 << 20)
    assert known.tunables["one_shot_bytes"] == 2 << 18  # at most a factor of two
    streamed = "streamed_rooted_bytes"
    assert known.tunables[streamed] == _core.DEFAULT_TUNABLES[streamed]
    assert streamed in known.sureness
    host_calibration(before_measuring=lambda: None)
    assert len(runs) == 3  # a third one is compared with the second


def test_each_kind_of_pages_and_number_of_ranks(
    runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for cores, measured in {2: [2, 4, 4, 4, 4], 16: [2, 4, 4, 8, 8]}.items():
        monkeypatch.setattr(calibration, "usable_cores", lambda cpus=None, cores=cores: cores)
        facts = [calibration.host_facts(None, ranks) for ranks in (1, 3, 4, 5, 64)]
        assert [each["ranks"] for each in facts] == measured
    for ranks in (2, 3, 4, 9, 64):
        host_calibration(ranks)
    assert len(runs) == 3
    monkeypatch.setattr(huge_pages, "in_tensors", lambda: "other")
    host_calibration(2)
    assert len(runs) == 4


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\0\xff" * 100,
        b"[" * 60_000,
        b"[]",
        b'{"rounds": [], "facts": {}}',
        {},
        {"chunk_bytes": -1},
        {"chunk_bytes": True},
        {"chunk_bytes": "many"},
    ],
)
def test_garbage_is_measured_again(
    runs: list[int], garbage: bytes | dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    host_calibration()
    (path,) = files()
    if isinstance(garbage, dict):
        content = json.loads(path.read_bytes())
        content["rounds"][0]["tunables"] = garbage and {**MEASURED, **garbage}
        garbage = json.dumps(content).encode()
    path.write_bytes(garbage)
    monkeypatch.setattr(calibration, "_known", {})
    assert host_calibration().tunables == MEASURED
    assert len(runs) == 2
    assert json.loads(path.read_bytes())["rounds"][-1]["tunables"] == MEASURED


def test_another_kernel_is_another_host(runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    host_calibration()
    facts = {**calibration.host_facts(), "kernel": "7.0"}
    monkeypatch.setattr(calibration, "host_facts", lambda cpus, ranks: facts)
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
    assert json.loads(path.read_bytes())["rounds"][-1]["tunables"] == MEASURED
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
    monkeypatch.setitem(MEASURED, "single_copy_rooted_below_bytes", 131072)
    wanted = group_tunables()
    assert set(calibration.read_ranges(wanted).values()) == {(65536, _core.NEVER_BYTES)}
    assert len(calibration.read_ranges(wanted)) == 6
    monkeypatch.setenv("TILEWORK_SINGLE_COPY", "0")
    assert group_tunables()["thread_copy_bytes"] == _core.NEVER_BYTES


def test_chunks_fit_into_caches_that_ranks_share() -> None:
    def chunks(ranks: int, second_level_bytes: int) -> tuple[int, int]:
        threads = tuple(frozenset({core, core + 2}) for core in range(2))
        topology = Topology((frozenset(range(4)),), threads, second_level_bytes)
        tunables = calibration.chunks_for(topology, ranks, MEASURED)
        return tunables["chunk_bytes"], tunables["reduce_chunk_bytes"]

    kib = 1024
    assert chunks(2, 1024 * kib) == (128 * kib, 512 * kib)
    assert chunks(4, 1024 * kib) == (64 * kib, 256 * kib)
    assert chunks(8, 1024 * kib) == (128 * kib, 512 * kib)  # by turns
    assert chunks(2, 256 * kib) == (128 * kib, 128 * kib)
    assert chunks(4, 256 * kib) == (64 * kib, 64 * kib)
    assert chunks(4, 0) == (64 * kib, 256 * kib)


def test_one_core_is_not_measured(runs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "usable_cores", lambda cpus=None: 1)  # a CPU quota, too
    assert host_calibration().origin == "not measured: that takes two cores"
    assert (runs, files()) == ([], [])


def test_disturbed_measurements_are_not_kept(
    runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def calibrate(cpus: list[int], *_: object, insists: bool) -> tuple[dict[str, int], list[Any]]:
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

    def calibrate(cpus: list[int], *_: object, insists: bool) -> tuple[dict[str, int], list[Any]]:
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

    def calibrate(cpus: list[int], *_: object, insists: bool) -> tuple[dict[str, int], list[Any]]:
        came_before.extend(came)
        return dict(MEASURED), []

    monkeypatch.setattr(shm_backend, "_join", join_late)
    monkeypatch.setattr(_core, "calibrate", calibrate)
    run_ranks(2, lambda rank: None, backend="shm")
    assert came_before == [1]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_core_measures(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWORK_SINGLE_COPY", raising=False)
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("takes two cores")
    tunables, measurements = _core.calibrate(cpus, ranks, huge=True, insists=True)
    assert set(tunables) == set(_core.DEFAULT_TUNABLES)
    assert tunables["threads_apart"] == 0
    assert {way for _, _, way, _ in measurements} >= {"outboxes", "chunks", "cached stores"}
    assert {operation for operation, *_ in measurements} >= {"all_gather", "all_reduce"}
    for first, end in calibration.read_ranges(tunables).values():
        assert first < end or first == _core.NEVER_BYTES
    assert all(seconds > 0 for *_, seconds in measurements)
    assert set(os.sched_getaffinity(0)) == set(cpus)
