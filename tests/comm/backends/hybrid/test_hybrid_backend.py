"""Hybrid groups on one machine that pretends to be several hosts. See also test_hosts.py."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, TypeVar

import pytest
import torch

import tilework.distributed as dist
from tests.comm.function_suites import WholeContract
from tilework.comm.backends.hybrid import hosts, meeting_engine
from tilework.comm.backends.hybrid.host_ranks import Hosts
from tilework.comm.backends.hybrid.hybrid_backend import HybridGroup
from tilework.comm.backends.shm import shm_backend
from tilework.comm.backends.torch.torch_engines import GlooGroup
from tilework.testing import run_ranks
from tilework.testing.groups.base import GroupSuite, inside
from tilework.testing.groups.disagreement import MismatchSuite, TimeoutSuite
from tilework.testing.groups.messages import MessageSuite
from tilework.testing.groups.moves import BroadcastSuite, GatherSuite
from tilework.testing.groups.reductions import AllReduceSuite, ReduceSuite
from tilework.testing.groups.values import assert_same, bits, folded, pattern

T = TypeVar("T")
LIMIT = timedelta(seconds=120)

pytestmark = pytest.mark.skipif(
    not dist.is_backend_available("hybrid"), reason="the core is not built, or torch has no gloo"
)


def pretend(monkeypatch: pytest.MonkeyPatch, host_of: Callable[[int], int]) -> None:
    """Let global rank r believe to be on host ``host_of(r)``."""

    def identity(request: dist.DistributedBackendOptions) -> str:
        return str(host_of(request.global_ranks_in_group[request.group_rank]))

    monkeypatch.setattr(hosts, "host_identity", identity)


def hybrid(n: int, fn: Callable[[int], T]) -> list[T]:
    return run_ranks(n, fn, backend="hybrid", timeout=LIMIT)


class OnTwoHosts(GroupSuite):
    """Ranks alternate between two hosts: neighbours are apart, and odd numbers uneven."""

    group_type: ClassVar[type[dist.ProcessGroup]] = HybridGroup

    @pytest.fixture(autouse=True)
    def _two_hosts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pretend(monkeypatch, lambda rank: rank % 2)


class TestTwoHosts(OnTwoHosts, WholeContract):
    world_sizes = (5,)
    large = 50_001

    def run(self, n: int, fn: Callable[[int], T]) -> list[T]:
        return hybrid(n, fn)


class TestTwoHostsBetweenProcesses(OnTwoHosts, AllReduceSuite, MessageSuite):
    world_sizes = (3,)
    both_forms = False
    dtypes = (torch.float32, torch.bfloat16, torch.bool)
    large = 400_001

    def run(self, n: int, fn: Callable[[int], T]) -> list[T]:
        return run_ranks(n, fn, kind="processes", backend="hybrid", timeout=LIMIT)


class TestThreeHosts(BroadcastSuite, GatherSuite, AllReduceSuite, ReduceSuite):
    """Hosts of three, two and one ranks: one lane, and tensors that are reduced in shares."""

    group_type = HybridGroup
    world_sizes = (6,)
    both_forms = False
    dtypes = (torch.float32, torch.int8)
    large = 50_001

    @pytest.fixture(autouse=True)
    def _three_hosts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pretend(monkeypatch, lambda rank: {0: 0, 3: 0, 4: 0, 1: 1, 5: 1}.get(rank, 2))

    def run(self, n: int, fn: Callable[[int], T]) -> list[T]:
        return hybrid(n, fn)


class TestGlooOnTwoHosts(OnTwoHosts, MismatchSuite, TimeoutSuite, MessageSuite):
    """Headers cross by the same meeting; Gloo moves the data of all ranks."""

    group_type = GlooGroup
    world_sizes = (3,)
    both_forms = False
    dtypes = (torch.float32,)
    large = 50_001

    def run(self, n: int, fn: Callable[[int], T]) -> list[T]:
        return run_ranks(n, fn, backend="gloo", timeout=LIMIT)


class FaultyLine:
    """A connection to another host that loses or delays the first thing that is sent."""

    def __init__(self, line: socket.socket, fault: str) -> None:
        self._line, self._fault = line, fault

    def sendall(self, data: bytes) -> None:
        fault, self._fault = self._fault, ""
        if fault == "late":
            time.sleep(0.5)
        if fault != "dropped":
            self._line.sendall(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._line, name)


@pytest.mark.parametrize(
    ("fault", "kind"), [("dropped", dist.CollectiveTimeoutError), ("late", None)]
)
@pytest.mark.parametrize("backend", ["gloo", "hybrid"])
def test_headers_that_are_lost_or_late(
    monkeypatch: pytest.MonkeyPatch, backend: str, fault: str, kind: type[Exception] | None
) -> None:
    pretend(monkeypatch, lambda rank: rank)

    def body(rank: int) -> type[Exception] | None:
        dist.barrier()
        group: Any = inside(dist.group.WORLD)
        group.set_timeout(timedelta(seconds=2))
        if rank == 1:
            group.engine._leaders = {0: FaultyLine(group.engine._leaders[0], fault)}
        try:
            dist.all_reduce(torch.ones(2))
        except dist.DistBackendError as error:
            return type(error)
        return None

    assert run_ranks(2, body, backend=backend, timeout=LIMIT) == [kind] * 2


def test_reductions_run_within_hosts_first(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda rank: rank // 2)

    def scaled(rank: int) -> torch.Tensor:
        return noise(rank) * 10.0**rank

    def body(rank: int) -> list[int]:
        tensor = scaled(rank)
        dist.all_reduce(tensor)
        by_host = [folded("SUM", [scaled(r), scaled(r + 1)]) for r in (0, 2, 4)]
        assert_same(tensor, folded("SUM", by_host))
        return [int(part) for part in bits(tensor).view(-1)[:5]]

    assert len(set(map(tuple, hybrid(6, body)))) == 1


def test_a_share_of_each_byte_crosses_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda rank: rank // 2)
    n, size = 4, 100_000

    def sent(act: Callable[[], object]) -> int:
        before = inside(dist.group.WORLD).statistics()["link_bytes"]
        act()
        return int(inside(dist.group.WORLD).statistics()["link_bytes"] - before)

    def body(rank: int) -> dict[str, int]:
        tensor, whole = torch.ones(size), torch.ones(n * size)
        return {
            "all_reduce": sent(lambda: dist.all_reduce(tensor)),
            "broadcast": sent(lambda: dist.broadcast(tensor, src=1)),
            "reduce": sent(lambda: dist.reduce(tensor, dst=3)),
            "all_gather": sent(lambda: dist.all_gather_into_tensor(whole, tensor)),
            "reduce_scatter": sent(lambda: dist.reduce_scatter_tensor(tensor, whole)),
            "all_to_all": sent(lambda: dist.all_to_all_single(whole, whole)),
        }

    by_rank = hybrid(n, body)
    nbytes = 4 * size
    of_hosts = {
        name: [sum(by_rank[r][name] for r in host) / nbytes for host in ((0, 1), (2, 3))]
        for name in by_rank[0]
    }
    assert of_hosts == {
        "all_reduce": [1, 1],
        "broadcast": [1, 0],
        "reduce": [1, 0],
        "all_gather": [2, 2],
        "reduce_scatter": [2, 2],
        "all_to_all": [4, 4],
    }


def noise(rank: int) -> torch.Tensor:
    return torch.randn(4, 30_000, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("hosts_of", [(0, 0, 1, 1), (0, 1, 2, 2)], ids=str)
@pytest.mark.parametrize(("sent", "share"), [(torch.bfloat16, 0.5), (torch.int8, 0.26)], ids=str)
def test_sums_between_hosts_are_rounded_if_asked(
    hosts_of: tuple[int, ...], sent: torch.dtype, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, hosts_of.__getitem__)
    total = torch.stack([noise(rank) for rank in range(4)]).sum(0)

    def body(rank: int) -> torch.Tensor:
        group = dist.new_group(
            backend="hybrid", pg_options=dist.HybridOptions(between_hosts=sent), timeout=LIMIT
        )
        same, part, exact = noise(rank), torch.empty(30_000), noise(rank)
        before = inside(group).statistics()["link_bytes"]
        dist.all_reduce(same, group=group)
        rounded = inside(group).statistics()["link_bytes"] - before
        dist.all_reduce(exact, op=dist.ReduceOp.MAX, group=group)
        most = inside(group).statistics()["link_bytes"] - before - rounded
        assert_same(exact, torch.stack([noise(r) for r in range(4)]).amax(0))
        assert rounded <= share * most
        dist.reduce_scatter_tensor(part, noise(rank), group=group)
        assert (part - total[rank]).abs().max() < 0.02 * total.abs().max()
        return same

    results = hybrid(4, body)
    for each in results:
        assert_same(each, results[0])
    assert 0 < (results[0] - total).abs().max() < 0.02 * total.abs().max()


def test_ranks_that_round_otherwise_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda rank: rank)

    def body(rank: int) -> None:
        options = dist.HybridOptions(between_hosts=(torch.bfloat16, torch.int8)[rank])
        with pytest.raises(dist.DistBackendError, match="the ranks differ in pg_options"):
            dist.new_group(backend="hybrid", pg_options=options, timeout=LIMIT)
        with pytest.raises(ValueError, match="'threads' does not take"):
            dist.new_group(backend="threads", pg_options=options)

    hybrid(2, body)
    with pytest.raises(ValueError, match="got torch"):
        dist.HybridOptions(between_hosts=torch.int16)


def test_a_sub_group_of_one_host_is_shared_memory_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, lambda rank: rank % 2)

    def body(rank: int) -> tuple[str, bool, float]:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        mine = inside(groups[rank % 2])
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=mine)
        return mine.name(), "link_bytes" in mine.statistics(), tensor.item()

    told = hybrid(4, body)
    assert told == [("hybrid", False, 2.0 + 2 * (rank % 2)) for rank in range(4)]


def test_ranks_that_cannot_share_memory_after_all_are_hosts_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, lambda rank: 0)

    def create(request: dist.DistributedBackendOptions, options: object) -> object:
        if request.group_size > 1:
            raise shm_backend.CannotShareMemoryError("a wall is between")
        return shm_backend.create_shm_group(request, options)

    monkeypatch.setattr(hosts, "create_shm_group", create)

    def body(rank: int) -> int:
        tensor = pattern(rank, (300,), torch.float32)
        dist.all_reduce(tensor)
        assert_same(tensor, folded("SUM", [pattern(r, (300,), torch.float32) for r in range(3)]))
        return int(inside(dist.group.WORLD).statistics()["hosts"])

    assert hybrid(3, body) == [3, 3, 3]


def test_lanes_are_as_many_as_the_smallest_host_has_ranks() -> None:
    hosts = [Hosts(((0, 2, 4), (1, 3)), rank) for rank in range(5)]
    assert [seen.lane for seen in hosts] == [0, 0, 1, 1, None]
    assert [seen.index for seen in hosts] == [0, 1, 0, 1, 0]
    assert hosts[2].peer(1) == 3


@pytest.mark.parametrize("looks", [1, 3])
def test_what_a_rank_sent_before_it_left_is_read(
    monkeypatch: pytest.MonkeyPatch, looks: int
) -> None:
    pretend(monkeypatch, lambda rank: rank)
    read, late = meeting_engine._read, threading.local()

    def read_late(line: socket.socket, memory: memoryview) -> int | None:
        engine = getattr(late, "engine", None)
        if engine is None:
            return read(line, memory)
        while not engine.departed():  # it has sent, and left, after this rank has found nothing
            time.sleep(0.01)
        late.looks -= 1
        if not late.looks:
            late.engine = None
        return 0

    monkeypatch.setattr(meeting_engine, "_read", read_late)

    def body(rank: int) -> None:
        dist.barrier()
        if rank == 1:
            group = dist.get_default_group()
            assert isinstance(group, HybridGroup)
            late.engine, late.looks = group.engine, looks
        dist.barrier()
        dist.destroy_process_group()

    hybrid(2, body)
