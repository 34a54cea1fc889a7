"""Ranks on CPUs of their own."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Collection
from itertools import groupby
from pathlib import Path

import pytest

from tests.launch.conftest import Launch
from tilework.cores import read_topology
from tilework.launch.binding import BindMode, bound_sets, hold, sets_for

PRINT_CPUS = """
import json, os
print(json.dumps([sorted(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"]]))
"""
LOADER_CPUS = """
import os
from torch.utils.data import DataLoader
class Rows:
    def __len__(self): return 2
    def __getitem__(self, number): return sorted(os.sched_getaffinity(0))
if __name__ == "__main__":
    found = list(DataLoader(Rows(), batch_size=None, num_workers=1))
    print(found[0] == sorted(os.sched_getaffinity(0)), len(found[0]))
"""


def _machine(root: Path, nodes: int, cores: int, threads: int = 1) -> Path:
    """A tree of ``/sys`` with memory nodes of some cores: siblings are numbered last, as usual."""
    system, per_thread = root / "sys/devices/system", nodes * cores
    for core in range(per_thread):
        cpus = [core + per_thread * thread for thread in range(threads)]
        for cpu in cpus:
            folder = system / f"cpu/cpu{cpu}/topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(",".join(map(str, cpus)))
    for node in range(nodes):
        own = range(node * cores, (node + 1) * cores)
        listed = [core + per_thread * thread for thread in range(threads) for core in own]
        folder = system / f"node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(",".join(map(str, listed)))
    (system / "cpu/online").write_text(f"0-{per_thread * threads - 1}")
    return root


def cpu_list(cpus: Collection[int]) -> str:
    """The numbers as text: ``0-2,5``."""
    runs = (
        [cpu for _, cpu in run]
        for _, run in groupby(enumerate(sorted(cpus)), lambda pair: pair[1] - pair[0])
    )
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


@pytest.mark.parametrize(
    ("mode", "ranks", "expected"),
    [
        ("cores", 4, ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]),
        ("cores", 8, ["0,8", "1,9", "2,10", "3,11", "4,12", "5,13", "6,14", "7,15"]),
        ("cores", 2, ["0-3,8-11", "4-7,12-15"]),
        ("cores", 1, ["0-15"]),
        ("numa", 4, ["0-3,8-11"] * 2 + ["4-7,12-15"] * 2),
        ("auto", 8, ["0,8", "1,9", "2,10", "3,11", "4,12", "5,13", "6,14", "7,15"]),
        ("auto", 9, []),
        ("none", 2, []),
    ],
)
def test_ranks_have_disjoint_cores_of_a_memory_node(
    mode: BindMode, ranks: int, expected: list[str], tmp_path: Path
) -> None:
    topology = read_topology(_machine(tmp_path, nodes=2, cores=4, threads=2), range(16))
    found = [cpu_list(each) for each in sets_for(mode, ranks, topology)]
    assert found == expected


def test_cores_of_nodes_that_have_fewer_are_for_fewer_ranks(tmp_path: Path) -> None:
    usable = [0, 1, 2, 3, 4]  # of eight: four on one node, and one on the other
    topology = read_topology(_machine(tmp_path, nodes=2, cores=4), usable)
    assert [cpu_list(each) for each in sets_for("cores", 4, topology)] == ["0", "1", "2-3", "4"]
    assert [cpu_list(each) for each in sets_for("cores", 3, topology)] == ["0", "1", "2-3"]


def test_more_ranks_than_cores_are_refused(tmp_path: Path) -> None:
    topology = read_topology(_machine(tmp_path, nodes=1, cores=2), range(2))
    with pytest.raises(ValueError, match="3 ranks cannot be bound to cores of their own"):
        sets_for("cores", 3, topology)


def test_a_quota_below_the_cpus_leaves_ranks_free(tmp_path: Path) -> None:
    cpus = os.sched_getaffinity(0)
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (group / "cpu.max").write_text(f"{len(cpus) * 50_000} 100000")
    with bound_sets("auto", 1, tmp_path) as sets:
        assert sets == ()


def test_cpus_of_a_job_are_held_until_its_launcher_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cpus = os.sched_getaffinity(0)
    ready, held = os.pipe()
    holder = os.fork()
    if holder == 0:
        with hold(cpus):
            os.write(held, b"1")
            signal.pause()
        os._exit(0)
    try:
        os.read(ready, 1)
        with bound_sets("auto", 1) as sets:
            assert sets == ()
        with bound_sets("cores", 1) as sets:
            assert sets == (frozenset(cpus),)
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        os.close(ready)
        os.close(held)
    with hold(cpus) as is_free:
        assert is_free


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_ranks_run_on_their_cpus_with_their_share_of_threads(launch: Launch, start: str) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    done = launch(PRINT_CPUS, "-n", "2", "--start", start, "--bind", "cores")
    ranks = [json.loads(line[4:]) for line in sorted(done.lines)]
    sets = sets_for("cores", 2, read_topology())
    assert [each[0] for each in ranks] == [sorted(each) for each in sets]
    assert {each[1] for each in ranks} == {str(len(cpus) // 2)}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs")
def test_workers_of_a_loader_stay_on_the_cpus_of_their_rank(launch: Launch) -> None:
    launch.with_torch()
    done = launch(LOADER_CPUS, "-n", "2", "--numa-binding", "exclusive")
    sizes = {len(each) for each in sets_for("cores", 2, read_topology())}
    assert {line[4:] for line in done.lines} <= {f"True {size}" for size in sizes}
    assert len(done.lines) == 2
