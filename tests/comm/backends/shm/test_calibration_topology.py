"""Choices on pretended machines, told as sysfs tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilework.comm.backends.shm.calibration import chunks_for
from tilework.cores import Topology, host_topology, read_topology

MIB = 1 << 20


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def pretend(
    root: Path, nodes: int, cores: int, threads: int = 1, online: str | None = None
) -> Topology:
    """A machine of so many nodes with so many cores each, all of whose CPUs may be used.

    Threads are numbered as Linux usually does: first all cores' first ones, then the second ones.
    """
    system, all_cores = root / "sys/devices/system", nodes * cores
    write(system / "cpu/online", online or f"0-{all_cores * threads - 1}")
    for node in range(nodes):
        first = [thread * all_cores + node * cores for thread in range(threads)]
        ranges = ",".join(f"{cpu}-{cpu + cores - 1}" for cpu in first)
        write(system / f"node/node{node}/cpulist", ranges)
    for cpu in range(all_cores * threads):
        siblings = ",".join(str(cpu % all_cores + t * all_cores) for t in range(threads))
        write(system / f"cpu/cpu{cpu}/topology/core_cpus_list", siblings)
    cache = system / "cpu/cpu0/cache/index2"
    for name, text in {"level": "2", "type": "Unified", "size": "1024K"}.items():
        write(cache / name, text)
    return read_topology(root, range(all_cores * threads))


def chunk(topology: Topology, ranks: int) -> int:
    sizes = chunks_for(topology, ranks, {"chunk_bytes": 8 * MIB, "reduce_chunk_bytes": MIB // 8})
    assert sizes["reduce_chunk_bytes"] <= MIB // 8
    return sizes["chunk_bytes"]


def test_a_rank_on_each_core(tmp_path: Path) -> None:
    topology = pretend(tmp_path, 4, 16)
    assert (len(topology.nodes), len(topology.cores)) == (4, 64)
    assert [chunk(topology, ranks) for ranks in (1, 2, 64)] == [MIB // 2] * 3


def test_threads_of_a_core_share_its_cache(tmp_path: Path) -> None:
    topology = pretend(tmp_path, 1, 4, threads=2)
    assert topology.cores == tuple(frozenset({core, core + 4}) for core in range(4))
    assert str(topology) == "4 cores of 2 threads on 1 memory node"
    assert chunk(topology, 4) == MIB // 2
    assert chunk(topology, 8) == MIB // 4
    assert chunk(topology, 16) == MIB // 2  # they take turns


def test_cpus_that_are_offline_do_not_count(tmp_path: Path) -> None:
    topology = pretend(tmp_path, 2, 4, online="0-2,4,6-7")
    assert topology.nodes == (frozenset({0, 1, 2}), frozenset({4, 6, 7}))
    assert topology.cpus == len(topology.cores) == 6


def test_cpus_that_this_process_may_not_use_do_not_count(tmp_path: Path) -> None:
    pretend(tmp_path, 2, 4)
    topology = read_topology(tmp_path, [5, 6])
    assert topology.nodes == (frozenset({5, 6}),)


def test_memory_without_cpus_is_no_node(tmp_path: Path) -> None:
    pretend(tmp_path, 1, 2)
    write(tmp_path / "sys/devices/system/node/node1/cpulist", "")
    assert len(read_topology(tmp_path, [0, 1]).nodes) == 1


def test_a_system_that_tells_nothing(tmp_path: Path) -> None:
    topology = read_topology(tmp_path, range(8))
    assert topology == Topology((frozenset(range(8)),), tuple(frozenset({c}) for c in range(8)))
    assert chunk(topology, 8) == 8 * MIB


@pytest.mark.parametrize("garbage", ["x", "3-", "-", "0-99999999999", "\0", "1,,2"])
def test_garbage_leaves_every_cpu_on_one_node_and_core(tmp_path: Path, garbage: str) -> None:
    system = tmp_path / "sys/devices/system"
    for name in ("cpu/online", "node/node0/cpulist", "cpu/cpu0/topology/core_cpus_list"):
        write(system / name, garbage)
    topology = read_topology(tmp_path, range(4))
    for groups in (topology.nodes, topology.cores):
        assert sorted(cpu for group in groups for cpu in group) == sorted(
            frozenset().union(*topology.nodes)
        )
    assert topology.cpus >= 1


def test_this_machine() -> None:
    topology = host_topology()
    assert topology is host_topology()
    assert topology.cpus >= len(topology.cores) >= 1
    assert chunk(topology, 2) >= 64 * 1024
