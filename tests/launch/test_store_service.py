"""``tilework store``: hosts of one job come, are lost and come back, and are told of each other."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hosts import two_hosts, why_no_hosts
from tests.launch.conftest import Launch, wait_for_files
from tilework.comm.backend import core_error
from tilework.launch.seating import LAST_CALL_SECONDS, Seating
from tilework.launch.settings import LaunchSettings

WAIT = """
    import os, time
    names = "RANK LOCAL_RANK WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE TILEWORK_REJOIN"
    told = " ".join(os.environ.get(name, "-") for name in names.split())
    open(f"rank-{os.environ['RANK']}-{os.getpid()}", "w").write(told)
    while not os.path.exists("end"):
        time.sleep(0.05)
"""


@contextlib.contextmanager
def served(launch: Launch, address: str, enter: Callable[[], None] | None = None) -> Iterator[int]:
    """A ``tilework store``; gives its process."""
    command = [sys.executable, "-m", "tilework.cli", "store", address]
    store = subprocess.Popen(
        command, env=launch.environment, preexec_fn=enter, stderr=subprocess.PIPE, text=True
    )
    assert store.stderr is not None
    try:
        while "serves a job" not in store.stderr.readline():
            assert store.poll() is None
        yield store.pid
    finally:
        store.terminate()
        store.communicate(timeout=60)


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TILEWORK_SECRET", "00ff" * 8)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def launch(tmp_path: Path, address: str) -> Iterator[Launch]:
    launch = Launch(tmp_path)
    yield launch
    launch.close()


def node(launch: Launch, address: str, nodes: str, ranks: int = 2) -> subprocess.Popen[bytes]:
    options = ("-n", str(ranks), "--nnodes", nodes, "--rdzv", address, "--timeout", "60")
    return launch.start(*options, launch.script(WAIT))


def told(launch: Launch, count: int) -> list[list[str]]:
    return [text.split() for text in wait_for_files(launch.folder, "rank-*", count)]


def test_a_host_that_is_lost_and_comes_again_gets_its_ranks(launch: Launch, address: str) -> None:
    with served(launch, address):
        first, second = (node(launch, address, "1:2") for _ in range(2))
        ranks = told(launch, 4)
        assert [words[0] for words in ranks] == ["0", "1", "2", "3"]
        assert [words[2:] for words in ranks] == [
            ["4", group, "2", "-"] for group in ("0", "0", "1", "1")
        ]
        first.kill()
        first.wait(60)
        again = node(launch, address, "1:2")
        groups = [words[3] for words in told(launch, 6)]
        lost = max(groups, key=groups.count)
        assert groups.count(lost) == 4
        (launch.folder / "end").touch()
        done = launch.finish(second)
        assert launch.finish(again).status == done.status == 0
        assert f"failed: node {lost} ({socket.gethostname()}) is gone" in done.err
        assert f"node {lost} ({socket.gethostname()}) has come, with ranks" in done.err


def test_a_store_that_dies_is_named_on_all_hosts(launch: Launch, address: str) -> None:
    with served(launch, address) as store:
        nodes = [node(launch, address, "2:2", ranks=1) for _ in range(2)]
        told(launch, 2)
        os.kill(store, signal.SIGKILL)
        done = [launch.finish(each) for each in nodes]
    assert [each.status for each in done] == [1, 1]
    assert all(f"the tilework store at {address} is gone" in each.err for each in done)


def test_too_few_hosts_end_the_job(launch: Launch, address: str) -> None:
    with served(launch, address):
        nodes = [node(launch, address, "2:2", ranks=1) for _ in range(2)]
        told(launch, 2)
        nodes[1].kill()
        assert "is gone" in launch.finish(nodes[0]).err
        assert nodes[0].returncode == 1


def test_hosts_that_differ_are_told_and_a_spare_one_waits(launch: Launch, address: str) -> None:
    with served(launch, address):
        first = node(launch, address, "1:1", ranks=1)
        told(launch, 1)
        other = launch.finish(node(launch, address, "1:3"))
        assert (other.status, "differ in --nnodes: this one 1:3" in other.err) == (1, True)
        spare = node(launch, address, "1:1", ranks=1)
        assert spare.stderr is not None
        assert b"waits at" in spare.stderr.readline()
        (launch.folder / "end").touch()
        assert launch.finish(first).status == 0
        done = launch.finish(spare)
        assert (done.status, "the job ended before" in done.err) == (0, True)


def test_what_serves_must_be_a_tilework_store(launch: Launch, address: str) -> None:
    options = ("--nnodes", "1:2", "--rdzv", "127.0.0.1:1", "--timeout", "2")
    started = launch.start("-n", "1", *options, launch.script(WAIT))
    assert "could not connect" in launch.finish(started).err.lower()


def test_a_job_begins_at_the_most_hosts_or_after_the_last_call() -> None:
    seating = Seating(1, 3)
    seating.arrive(1, 2, "a", 0.0)
    seating.arrive(2, 1, "b", 3.0)
    assert not list(seating.newly_seated(LAST_CALL_SECONDS))
    begun = dict(seating.newly_seated(3.0 + LAST_CALL_SECONDS))
    assert [seats.numbers for seats in begun.values()] == [range(2), range(2, 3)]
    assert seating.world_size == 3


def test_seats_of_a_lost_host_fit_hosts_with_as_many_ranks() -> None:
    seating = Seating(1, 2)
    for caller in (1, 2):
        seating.arrive(caller, 2, "ab"[caller - 1], 0.0)
    assert len(list(seating.newly_seated(0.0))) == 2
    seating.arrive(3, 3, "c", 1.0)
    assert not list(seating.newly_seated(1.0))  # there is no place
    lost = seating.leave(1)
    assert lost is not None
    assert lost.numbers == range(2)
    ((_, seats),) = seating.newly_seated(2.0)
    assert (seats.node, seats.numbers) == (2, range(4, 7))
    seating.leave(3)
    seating.arrive(4, 2, "d", 3.0)
    ((_, seats),) = seating.newly_seated(3.0)
    assert (seats.node, seats.numbers, seats.host) == (0, range(2), "d")


def test_seats_that_are_taken_back_are_given_when_all_have_come_again() -> None:
    seating = Seating(1, 2)
    for caller in (1, 2):
        seating.arrive(caller, 1, "ab"[caller - 1], 0.0)
    assert len(list(seating.newly_seated(0.0))) == 2
    seating = seating.renewed()
    seating.arrive(1, 1, "a", 1.0)
    assert not list(seating.newly_seated(60.0))
    seating.leave(2)
    assert [seats.node for _, seats in seating.newly_seated(60.0)] == [0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"elastic_nodes": (1, 2)}, "where `tilework store` serves"),
        ({"elastic_nodes": (1, 2), "rdzv": ("h", 1), "elastic": (1, 1)}, "leave out --elastic"),
        ({"elastic_nodes": (1, 2), "rdzv": ("h", 1), "master_port": 0}, "leave out --node-rank"),
    ],
)
def test_wrong_settings(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LaunchSettings(nprocs=1, nnodes=2, **options)  # type: ignore[arg-type]


MEET = """
    import os, time
    import tilework.distributed as dist
    open(f"here-{os.environ['RANK']}-{os.getpid()}", "w").write("here")
    while os.environ["RANK"] == "1" and not os.path.exists("go"):
        time.sleep(0.05)
    dist.init_process_group("gloo")
    open(f"rank-{os.environ['RANK']}-{os.getpid()}", "w").write(str(dist.get_world_size()))
    while not os.path.exists("end"):
        time.sleep(0.05)
"""


def test_all_begin_again_if_a_host_is_lost_before_the_ranks_met(
    launch: Launch, address: str
) -> None:
    launch.with_torch()
    command = ("-n", "1", "--nnodes", "1:2", "--rdzv", address, launch.script(MEET))
    with served(launch, address):
        nodes = [launch.start(*command) for _ in range(2)]
        wait_for_files(launch.folder, "here-*", 2)
        nodes[1].kill()
        nodes[1].wait(60)
        (launch.folder / "go").touch()
        nodes[1] = launch.start(*command)
        assert wait_for_files(launch.folder, "rank-*", 2) == ["2", "2"]
        (launch.folder / "end").touch()
        assert [launch.finish(each).status for each in nodes] == [0, 0]


def test_a_host_that_waits_to_be_let_in_ends_with_the_others(launch: Launch, address: str) -> None:
    launch.with_torch()
    (launch.folder / "go").touch()
    command = ("-n", "1", "--nnodes", "1:2", "--rdzv", address, launch.script(MEET))
    with served(launch, address):
        first = launch.start(*command)
        wait_for_files(launch.folder, "rank-0-*", 1)
        late = launch.start(*command)
        wait_for_files(launch.folder, "here-1-*", 1)
        (launch.folder / "end").touch()
        assert launch.finish(first).status == 0
        done = launch.finish(late)
    assert (done.status, "finished without it" in done.err) == (0, True)


TRAIN = """
    import os, time, torch
    import tilework.distributed as dist
    from tilework.parallel import Resilient
    dist.init_process_group()

    def build():
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.01)}

    def step(state, number):
        x = torch.randn(12, 4, generator=torch.Generator().manual_seed(number))
        rows = x[loop.share(12)]
        loss = (state["model"](rows) - rows.sum(1, keepdim=True)).square().sum() / 12
        state["optimizer"].zero_grad()
        loss.backward()
        for parameter in state["model"].parameters():
            dist.all_reduce(parameter.grad)
        state["optimizer"].step()
        told = torch.tensor([loss.item(), os.path.exists("end")])
        dist.all_reduce(told)
        time.sleep(0.05)
        return told.tolist()

    loop = Resilient(build, step)
    mine = f"rank-{os.environ['RANK']}-{os.getpid()}"
    for number, (loss, ends) in loop.run(4000):
        with open("losses", "a") as losses:
            losses.write(f"{number} {loss}\\n")
        if number == 5 or loop.events[-1].kind == "joined":
            open(mine, "w").write(f"{dist.get_world_size()} {loop.events[-1].kind}")
        if ends:
            break
"""


@pytest.mark.skipif(core_error() is not None, reason="the core is not built")
@pytest.mark.parametrize("victim", [0, 1])
def test_losses_go_on_when_a_host_is_lost_and_comes_back(launch: Launch, victim: int) -> None:
    script = _script_for_hosts(launch)
    with two_hosts() as hosts, served(launch, f"{hosts[0].address}:29500", hosts[0].enter):

        def start(at: int) -> subprocess.Popen[bytes]:
            where = ("--nnodes", "1:2", "--rdzv", f"{hosts[0].address}:29500")
            return launch.start("-n", "1", *where, script, preexec_fn=hosts[at].enter)

        nodes = [start(0), start(1)]
        assert wait_for_files(launch.folder, "rank-*", 2) == ["2 started"] * 2
        nodes[victim].kill()
        nodes[victim].wait(60)
        nodes[victim] = start(victim)
        assert sorted(wait_for_files(launch.folder, "rank-*", 3)).count("2 joined") >= 1
        (launch.folder / "end").touch()
        assert [launch.finish(each).status for each in nodes] == [0, 0]
    lines = (launch.folder / "losses").read_text().split("\n")[:-1]
    losses = {int(number): float(loss) for number, loss in map(str.split, lines)}
    assert list(losses) == list(range(len(losses)))
    expected = _losses_of_one_process(len(losses))
    assert list(losses.values()) == pytest.approx(expected, rel=1e-3, abs=1e-9)


@pytest.mark.skipif(core_error() is not None, reason="the core is not built")
def test_a_job_of_one_host_grows_over_a_second(launch: Launch) -> None:
    script = _script_for_hosts(launch)
    with two_hosts() as hosts, served(launch, f"{hosts[0].address}:29500", hosts[0].enter):
        where = ("-n", "1", "--nnodes", "1:2", "--rdzv", f"{hosts[0].address}:29500")
        nodes = [launch.start(*where, script, preexec_fn=hosts[0].enter)]
        assert wait_for_files(launch.folder, "rank-*", 1) == ["1 started"]
        nodes.append(launch.start(*where, script, preexec_fn=hosts[1].enter))
        assert wait_for_files(launch.folder, "rank-1-*", 1) == ["2 joined"]
        (launch.folder / "end").touch()
        assert [launch.finish(each).status for each in nodes] == [0, 0]


@pytest.mark.skipif(core_error() is not None, reason="the core is not built")
def test_a_job_on_shared_memory_does_not_grow_over_hosts_and_says_so(launch: Launch) -> None:
    script = _script_for_hosts(launch)
    with two_hosts() as hosts, served(launch, f"{hosts[0].address}:29500", hosts[0].enter):
        rdzv = ("--rdzv", f"{hosts[0].address}:29500")
        where = ("-n", "1", "--nnodes", "1:2", "--backend", "shm", *rdzv)
        first = launch.start(*where, script, preexec_fn=hosts[0].enter)
        assert wait_for_files(launch.folder, "rank-*", 1) == ["1 started"]
        second = launch.finish(launch.start(*where, script, preexec_fn=hosts[1].enter))
        assert (second.status, "Start the job with --backend hybrid" in second.err) == (1, True)
        (launch.folder / "end").touch()
        assert launch.finish(first).status == 0


def _script_for_hosts(launch: Launch) -> str:
    """The program of a job over hosts; skips the test where no hosts can be made."""
    why_not = why_no_hosts()
    if why_not is not None:
        pytest.skip(why_not)
    launch.with_torch()
    return launch.script(TRAIN)


def _losses_of_one_process(steps: int) -> list[float]:
    import torch

    torch.manual_seed(0)
    model, losses = torch.nn.Linear(4, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for number in range(steps):
        x = torch.randn(12, 4, generator=torch.Generator().manual_seed(number))
        loss = (model(x) - x.sum(1, keepdim=True)).square().sum() / 12
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
