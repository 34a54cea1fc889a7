"""Hosts with links between them: right results, few bytes, deaths that are noticed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import tilework.distributed as dist
from tests.faults.forked_ranks import ForkedRanks, Say
from tests.hosts import Host, joined, joined_hosts, run_on_hosts, two_hosts, why_no_hosts
from tests.limits import PROMPTLY
from tests.random_programs import OPERATIONS, RandomOperation, RandomProgram, run_program
from tilework.testing.groups.base import brief_group
from tilework.testing.groups.values import Case

WHY_NOT = why_no_hosts()
WHY_NOT_FAR = WHY_NOT or why_no_hosts(delay_ms=1)
pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT)),
    pytest.mark.skipif(not dist.is_backend_available("hybrid"), reason="the core is not built"),
]
#: Ranks 0 and 1 on one host, 2 and 3 on the other.
PAIRS = (0, 0, 1, 1)
Hosts = tuple[Host, ...]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with joined_hosts(3, mbit=400) as made:
        yield made


@pytest.mark.parametrize("layout", [PAIRS, (0, 1, 2), (1, 0, 0, 0)], ids=str)
def test_every_operation(hosts: Hosts, layout: tuple[int, ...]) -> None:
    n = len(layout)
    steps = tuple(
        RandomOperation(
            operation, Case(shape, dtype), turn % n, "SUM", async_op=turn % 2 == 0, seed=turn
        )
        for turn, (operation, shape, dtype) in enumerate(
            (operation, shape, dtype)
            for operation in sorted(OPERATIONS)
            for shape, dtype in (((3, 7), torch.bfloat16), ((20_001,), torch.float32))
        )
    )

    def body(rank: int) -> str:
        run_program(RandomProgram(n, steps), rank)
        return dist.get_backend()

    assert run_on_hosts(hosts, layout, body, backend=None) == ["hybrid"] * n


def test_sub_groups_within_and_across(hosts: Hosts) -> None:
    def body(rank: int) -> list[float]:
        sums = []
        for members in ([0, 1], [2, 3], [0, 2], [1, 2, 3]):
            group = dist.new_group(members)
            if rank in members:
                tensor = torch.full((1000,), 2.0**rank)
                dist.all_reduce(tensor, group=group)
                assert len(set(tensor.tolist())) == 1
                sums.append(tensor[0].item())
        return sums

    assert run_on_hosts(hosts, PAIRS, body) == [[3, 5], [3, 14], [12, 5, 14], [12, 14]]


SIZE = 250_000  # float32: a megabyte
#: Megabytes that each host has to send.
MOVES: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], tuple[int, int]]] = {
    "all_reduce": (lambda part, whole: dist.all_reduce(part), (1, 1)),
    "broadcast": (lambda part, whole: dist.broadcast(part, src=1), (1, 0)),
    "reduce": (lambda part, whole: dist.reduce(part, dst=1), (0, 1)),
    "all_gather": (lambda part, whole: dist.all_gather_into_tensor(whole, part), (2, 2)),
    "reduce_scatter": (lambda part, whole: dist.reduce_scatter_tensor(part, whole), (2, 2)),
    "all_to_all": (lambda part, whole: dist.all_to_all_single(whole, whole), (4, 4)),
    "barrier": (lambda part, whole: dist.barrier(), (0, 0)),
}


def test_the_link_carries_what_it_must_and_no_more(hosts: Hosts, tmp_path: Path) -> None:
    def body(rank: int) -> dict[str, list[int]]:
        part, whole = torch.ones(SIZE), torch.ones(4 * SIZE)
        counter = Path("/proc/thread-self/net/dev")
        sent: dict[str, list[int]] = {}
        for name, (move, _) in MOVES.items():
            dist.barrier()
            time.sleep(0.05)  # until what the barrier itself sent has been counted
            before = _sent(counter)
            move(part, whole)
            dist.barrier()
            sent[name] = [_sent(counter) - before]
        return sent

    by_rank = run_on_hosts(hosts, PAIRS, body)
    for name, (_, must) in MOVES.items():
        for rank, megabytes in zip((0, 2), must, strict=True):
            (sent,) = by_rank[rank][name]
            # Headers of TCP and of the operation, and acknowledgements of what the other sent.
            least, most = megabytes * 1e6, megabytes * 1.03e6 + 60_000
            assert least <= sent <= most, (name, rank, sent)


def _sent(counter: Path) -> int:
    """Bytes sent by the interfaces of this thread's network namespace, loopback aside."""
    lines = [line.split() for line in counter.read_text().splitlines()[2:]]
    return sum(int(line[9]) for line in lines if line[0] != "lo:")


@pytest.mark.parametrize(
    ("backend", "victim"), [("hybrid", 0), ("hybrid", 3), ("gloo", 1), ("gloo", 2)]
)
def test_killing_a_rank_is_noticed_on_every_host(hosts: Hosts, backend: str, victim: int) -> None:
    def story(rank: int, say: Say) -> None:
        with joined(hosts, PAIRS, rank, backend):
            tensor = torch.ones(100_000)
            dist.all_reduce(tensor)
            say("ready")
            try:
                while True:
                    dist.all_reduce(tensor)
            except dist.DistBackendError as error:
                say((type(error), error.ranks, time.monotonic()))
            os._exit(0)

    with ForkedRanks(4, story) as ranks:
        for rank in ranks:
            assert rank.hear() == "ready"
        time.sleep(0.1)
        died = ranks[victim].kill(signal.SIGKILL)
        for rank in ranks.others(victim):
            kind, lost_ranks, when = rank.hear()
            assert kind is dist.PeerLostError
            assert lost_ranks == (victim,)
            assert when - died < PROMPTLY


@pytest.mark.parametrize("operation", ["all_reduce", "send", "recv"])
def test_killing_a_rank_within_a_transfer_is_noticed(hosts: Hosts, operation: str) -> None:
    # On this link it takes seconds. Gloo wakes nobody who waits for what is half there.
    def story(rank: int, say: Say) -> None:
        with joined(hosts, (0, 1), rank):
            tensor = torch.ones(40_000_000)
            sends = rank == (operation == "send")
            dist.barrier()
            say("ready")
            try:
                if operation == "all_reduce":
                    dist.all_reduce(tensor)
                else:
                    (dist.send if sends else dist.recv)(tensor, 1 - rank)
            except dist.DistBackendError as error:
                say((type(error), error.ranks))
            os._exit(0)

    with ForkedRanks(2, story) as ranks:
        for rank in ranks:
            assert rank.hear() == "ready"
        time.sleep(0.7)
        ranks[1].kill(signal.SIGKILL)
        assert ranks[0].hear() == (dist.PeerLostError, (1,))


def test_a_rank_that_does_not_come_is_named_on_every_host(hosts: Hosts, tmp_path: Path) -> None:
    def body(rank: int) -> tuple[str, tuple[int, ...]] | None:
        group = brief_group(timedelta(seconds=3))  # whoever comes does so in time
        caught = None
        if rank == 3:  # in another collective it would be found in a circle of waits
            while len(list(tmp_path.iterdir())) < 3:
                time.sleep(0.01)
        else:
            with pytest.raises(dist.CollectiveTimeoutError) as raised:
                dist.all_reduce(torch.ones(5), group=group)
            caught = (str(raised.value), raised.value.ranks)
            (tmp_path / str(rank)).touch()
        dist.barrier()
        return caught

    for told in run_on_hosts(hosts, PAIRS, body)[:3]:
        assert told is not None
        assert told[1] == (3,)
        assert "all_reduce" in told[0]


def _reduce_in_two_orders(rank: int) -> None:
    pair = [dist.new_group([0, 1]) for _ in range(2)]
    for group in pair if rank == 0 else pair[::-1]:
        dist.all_reduce(torch.ones(2), group=group)


def _receive_from_each_other(rank: int) -> None:
    dist.recv(torch.ones(2), 1 - rank)


@pytest.mark.parametrize("program", [_reduce_in_two_orders, _receive_from_each_other])
def test_hosts_that_wait_for_each_other_are_told(
    hosts: Hosts, program: Callable[[int], None]
) -> None:
    def body(rank: int) -> None:
        with pytest.raises(dist.CollectiveMismatchError, match="wait for each other in a circle"):
            program(rank)

    run_on_hosts(hosts, (0, 1), body)


def test_gloo_finds_the_way_by_itself(hosts: Hosts) -> None:
    def body(rank: int) -> float:
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor)
        return tensor.item()

    assert run_on_hosts(hosts, PAIRS, body, backend="gloo") == [6.0] * 4


@pytest.mark.parametrize("layout", [PAIRS, (0, 1, 2, 2)], ids=str)
def test_calls_of_gloo_are_compared_across_hosts(hosts: Hosts, layout: tuple[int, ...]) -> None:
    x, odd = torch.ones(2), torch.ones(2, dtype=torch.int32)
    calls: dict[str, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
        "dtype": (lambda g: dist.all_reduce(x, group=g), lambda g: dist.all_reduce(odd, group=g)),
        "operation": (lambda g: dist.all_reduce(x, group=g), lambda g: dist.broadcast(x, 0, g)),
        "root": (lambda g: dist.broadcast(x, 0, g), lambda g: dist.broadcast(x, 1, g)),
        "shape": (
            lambda g: dist.all_reduce(x, group=g),
            lambda g: dist.all_reduce(torch.ones(2, 1), group=g),
        ),
    }

    def body(rank: int) -> dict[str, str]:
        found = {}
        for what, (common, other) in calls.items():
            group = dist.new_group()
            dist.barrier(group)
            with pytest.raises(dist.CollectiveMismatchError) as caught:
                (other if rank == 3 else common)(group)
            found[what] = str(caught.value)
        return found

    for found in run_on_hosts(hosts, layout, body, backend="gloo"):
        assert (
            "ranks 0 to 2 called all_reduce float32 [2] SUM, rank 3 all_reduce int32"
            in (found["dtype"])
        )
        for what, text in found.items():
            assert f"differ in {what}" in text or f"or {what} as given" in text, (what, text)


@pytest.mark.skipif(WHY_NOT_FAR is not None, reason=str(WHY_NOT_FAR))
@pytest.mark.parametrize("backend", ["hybrid", "gloo"])
def test_far_hosts_whose_packets_get_lost(backend: str) -> None:
    def body(rank: int) -> str:
        for count in (1, 100_000):
            x = torch.full((count,), 2.0**rank)
            dist.all_reduce(x)
            assert set(x.tolist()) == {15.0}
        with pytest.raises(dist.CollectiveMismatchError) as caught:
            dist.all_reduce(torch.ones(2 + (rank == 3)))
        return str(caught.value)

    with two_hosts(mbit=100, delay_ms=20, loss_percent=1) as far:
        for text in run_on_hosts(far, PAIRS, body, backend):
            assert "ranks 0 to 2 called all_reduce float32 [2]" in text


def test_a_cut_link_is_noticed_on_both_sides() -> None:
    with two_hosts() as cut:

        def story(rank: int, say: Say) -> None:
            cut[PAIRS[rank]].enter()
            store = dist.TCPStore(cut[0].address, 29400, 4, rank == 0)
            dist.init_process_group("hybrid", store=store, rank=rank, world_size=4)
            dist.barrier()
            say("ready")
            try:
                while True:
                    dist.all_reduce(torch.ones(300_000))
            except dist.PeerLostError as error:
                say((error.ranks, time.monotonic()))
            time.sleep(20)

        with ForkedRanks(4, story) as ranks:
            for rank in ranks:
                assert rank.hear() == "ready"
            time.sleep(0.2)
            cut[1].run("ip", "link", "set", cut[1].interface, "down")
            begun = time.monotonic()
            for number, rank in enumerate(ranks):
                lost, when = rank.hear()
                assert set(lost) & ({2, 3} if number < 2 else {0, 1}), (number, lost)
                assert when - begun < 8.0
            for rank in ranks:
                rank.kill()


def test_a_link_that_is_cut_for_a_moment_heals() -> None:
    with two_hosts() as cut:
        link = ("ip", "link", "set", cut[1].interface)

        def body(rank: int) -> float:
            tensor = torch.ones(100_000)
            for turn in range(4):
                if turn == 1 and rank == 3:
                    cut[1].run(*link, "down")
                    time.sleep(1.5)
                    cut[1].run(*link, "up")
                dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
            return tensor.sum().item()

        assert run_on_hosts(cut, PAIRS, body) == [100_000.0] * 4


def test_a_rank_of_another_host_that_calls_a_collective_instead_of_new_group(hosts: Hosts) -> None:
    def body(rank: int) -> str:
        dist.barrier()
        wrong: Callable[[], object] = lambda: dist.all_reduce(torch.ones(3))  # noqa: E731
        call = wrong if rank == 3 else dist.new_group
        with pytest.raises(dist.CollectiveMismatchError, match="group_1") as caught:
            call()
        return str(caught.value)

    texts = run_on_hosts(hosts, PAIRS, body, timeout=timedelta(seconds=60))
    assert all("all_reduce" in text for text in texts), texts


@pytest.mark.parametrize("victim", [1, 2])
def test_a_rank_that_dies_instead_of_new_group(hosts: Hosts, victim: int) -> None:
    def story(rank: int, say: Say) -> None:
        hosts[PAIRS[rank]].enter()
        store = dist.TCPStore(hosts[0].address, 29401 + victim, 4, rank == 0)
        dist.init_process_group("hybrid", store=store, rank=rank, world_size=4)
        dist.barrier()
        if rank == victim:
            say(time.monotonic())
            os.execvp("sleep", ["sleep", "30"])
        with pytest.raises(dist.PeerLostError) as caught:
            dist.new_group()
        say((caught.value.ranks, time.monotonic()))
        time.sleep(20)

    with ForkedRanks(4, story) as ranks:
        begun = ranks[victim].hear()
        for rank in ranks.others(victim):
            lost, when = rank.hear()
            assert lost == (victim,)
            assert when - begun < PROMPTLY
        for rank in ranks:
            rank.kill()
