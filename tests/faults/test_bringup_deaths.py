"""A rank that ends, or waits elsewhere, while a group is made is noticed and named by all."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch

import tilework.distributed as dist
from tests.faults.forked_ranks import ForkedRanks, Say
from tests.faults.workload import SeenError, join
from tests.limits import PROMPTLY
from tests.store.client_process import process
from tests.tables import pairs
from tests.warm_python import run_warm
from tilework.comm.making import group_plan
from tilework.errors import CollectiveMismatchError, DistError, DistNetworkError, PeerLostError

LIMIT = timedelta(minutes=5)
#: The function by which a group is made once all have met.
MAKE = "make_backend"


def unused_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def seen(act: Callable[[], object]) -> SeenError:
    """The error that ``act`` raises."""
    try:
        act()
    except DistError as error:
        return SeenError(type(error), str(error), getattr(error, "ranks", ()), time.monotonic())
    raise AssertionError("nothing was raised")


def store_of(kind: str, rank: int, where: str) -> dist.Store:
    if kind == "file":
        return dist.FileStore(where)
    return dist.TCPStore("127.0.0.1", int(where), is_master=rank == 0, wait_for_workers=False)


def init(rank: int, n: int, store: dist.Store, backend: str = "shm") -> None:
    dist.init_process_group(backend, store=store, rank=rank, world_size=n, timeout=LIMIT)


def sleep_program() -> None:
    os.execvp("sleep", ["sleep", "30"])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


ENDS: dict[str, Callable[[], None]] = {"kill": die, "exec": sleep_program}


def die_at_making(end: Callable[[], None]) -> None:
    """End when the group is about to be made, after all have met."""
    setattr(group_plan, MAKE, lambda *args: end())


@pairs(end=ENDS, kind=["file", "tcp"], victim=[0, 1], when=["meeting", "making"])
def test_an_end_while_the_first_group_is_made(
    when: str, victim: int, kind: str, end: str, tmp_path: Path
) -> None:
    where = str(tmp_path / "store") if kind == "file" else str(unused_port())
    late = 2 if when == "meeting" else None

    def story(rank: int, say: Say) -> None:
        store = store_of(kind, rank, where)
        if rank == victim:
            if when == "making":
                die_at_making(ENDS[end])
            say("about to end")
            if when == "meeting":
                signal.signal(signal.SIGALRM, lambda *_: ENDS[end]())
                signal.setitimer(signal.ITIMER_REAL, 0.4)
        if rank == late:
            time.sleep(20)
        say(seen(lambda: init(rank, 3, store)))
        time.sleep(20)

    with ForkedRanks(3, story) as ranks:
        assert ranks[victim].hear() == "about to end"
        begun = time.monotonic()
        for survivor in {0, 1, 2} - {victim, late}:
            heard = ranks[survivor].hear()
            assert heard.kind is PeerLostError, heard
            assert heard.ranks == (victim,), heard
            assert heard.when - begun < 0.5 + 2.0
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_an_end_before_a_rank_has_said_who_it_is(kind: str, end: str, tmp_path: Path) -> None:
    """It has made its store, as have all; so nobody else can be the rank that is missing."""
    where = str(tmp_path / "store") if kind == "file" else str(unused_port())

    def story(rank: int, say: Say) -> None:
        if kind == "file":
            store: dist.Store = dist.FileStore(where, 3)
        else:
            store = dist.TCPStore("127.0.0.1", int(where), 3, is_master=rank == 0)
        if rank == 1:
            say(time.monotonic())
            ENDS[end]()
        say(seen(lambda: init(rank, 3, store)))
        time.sleep(20)

    with ForkedRanks(3, story) as ranks:
        begun = ranks[1].hear()
        for rank in ranks.others(1):
            heard = rank.hear()
            assert (heard.kind, heard.ranks) == (PeerLostError, (1,)), heard
            assert heard.when - begun < LIMIT.total_seconds() / 2  # not at the time-out
        for rank in ranks:
            rank.kill()


LAUNCHED = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
folder, at_once, victim = Path(sys.argv[1]), sys.argv[2] == "at once", int(sys.argv[3])
rank = int(os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
if rank == victim:
    while not (at_once or (folder / "imported").exists()):
        time.sleep(0.01)
    sys.exit(0)
import tilework.distributed as dist
(folder / "imported").touch()
try:
    dist.init_process_group(timeout=timedelta(minutes=2))
except dist.PeerLostError as error:
    (folder / "survivor").write_text(str(error.ranks))
"""


@pytest.mark.parametrize(
    ("launcher", "victim"),
    [
        *(("tilework run", 1), ("mpirun", 1), ("bare", 1), ("torchrun", 1)),
        ("tilework run --tcp", 0),  # rank 0 serves the store
    ],
)
def test_a_launched_rank_that_ends_in_order_without_coming(
    launcher: str, victim: int, tmp_path: Path
) -> None:
    """No launcher takes an exit status of 0 for a failure, so none ends the others."""
    if launcher == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("there is no mpirun")
    (tmp_path / "program.py").write_text(LAUNCHED)
    # Without a launcher's word it must be there when the other one first looks.
    moment = "at once" if launcher.startswith("tilework run") else "once seen"
    rank = [str(tmp_path / "program.py"), str(tmp_path), moment, str(victim)]
    python = [sys.executable]
    both = ["--nproc-per-node=2"]
    commands = {
        "tilework run": [["-m", "tilework", "run", "-n", "2", *rank]],
        "tilework run --tcp": [["-m", "tilework", "run", "--tcp", "-n", "2", *rank]],
        "torchrun": [["-m", "torch.distributed.run", "--standalone", *both, *rank]],
        "mpirun": [["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", *python, *rank]],
        "bare": [[*python, *rank]] * 2,
    }[launcher]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port()), "WORLD_SIZE": "2"}
    if commands[0][0] == "-m":
        run_warm(*commands[0], cwd=tmp_path, env={**os.environ, **place})
        commands = []
    processes = []
    for number, command in enumerate(commands):
        own = {**place, "RANK": str(number)} if launcher == "bare" else {}
        processes.append(subprocess.Popen(command, env={**os.environ, **own}, cwd=tmp_path))
    try:
        for process in processes:
            process.wait(60)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert (tmp_path / "survivor").read_text() == f"({victim},)"


SPAWNED = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
import tilework.distributed as dist
from tilework.launch import spawn

def main(rank, folder, port, phase):
    place = dict(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    if port:
        os.environ.update(place)
    if phase == "before" and rank == 0:
        return
    try:
        if phase == "making" and rank == 1:
            from tilework.comm.making import group_plan
            group_plan.make_backend = lambda *args: os._exit(0)
        dist.init_process_group(timeout=timedelta(minutes=2))
        if phase == "new_group" and rank == 1:
            os._exit(0)
        dist.new_group()
    except dist.PeerLostError as error:
        (Path(folder) / "survivor").write_text(str(error.ranks))

if __name__ == "__main__":
    spawner, *arguments = sys.argv[1:]
    if spawner == "tilework":
        spawn(main, tuple(arguments), 2, start="fork")
    else:
        from torch.multiprocessing.spawn import start_processes
        start_processes(main, arguments, 2, start_method="fork")
"""


@pytest.mark.parametrize("phase", ["before", "making", "new_group"])
@pytest.mark.parametrize("spawner", ["tilework", "torch"])
def test_a_spawned_rank_that_ends_in_order(spawner: str, phase: str, tmp_path: Path) -> None:
    """Neither spawner takes that for a failure."""
    program = tmp_path / "program.py"
    program.write_text(SPAWNED)
    port = str(unused_port()) if spawner == "torch" else ""
    done = run_warm(str(program), spawner, str(tmp_path), port, phase, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "survivor").read_text() == ("(0,)" if phase == "before" else "(1,)")


@pytest.mark.parametrize("awaited", [2, 3])
def test_a_store_that_dies_while_ranks_meet_is_named(awaited: int) -> None:
    """Rank 2 does not come to a further group, or rank 3 not to the first."""
    program = """
        server = StoreServer.listen_tcp("127.0.0.1", 0)
        server.start()
        print(server.port, flush=True)
        time.sleep(60)
    """
    with process(program) as server:
        port = int(server.line())

        def story(rank: int, say: Say) -> None:
            store = dist.TCPStore("127.0.0.1", port)
            say("ready")
            if awaited == 3:
                say(seen(lambda: init(rank, 4, store, "gloo")))
                return
            init(rank, 3, store, "gloo")
            say("met")
            time.sleep(60 * (rank == awaited))
            say(seen(dist.new_group))

        with ForkedRanks(3, story) as ranks:
            for heard in [rank.hear() for rank in [*ranks] * (4 - awaited)]:
                assert heard in ("ready", "met")
            time.sleep(0.3)
            died = time.monotonic()
            server.kill()
            for rank in [*ranks][:awaited]:
                heard = rank.hear()
                assert heard.kind is DistNetworkError
                assert heard.when - died < PROMPTLY
                assert "the store server at 127.0.0.1" in heard.text
            for rank in ranks:
                rank.kill()


@pytest.mark.parametrize("end", ENDS)
def test_an_end_instead_of_new_group(end: str, tmp_path: Path) -> None:
    def story(rank: int, say: Say) -> None:
        join(rank, 3, tmp_path / "store", LIMIT)
        if rank == 1:
            dist.barrier()
            say(time.monotonic())
            time.sleep(0.3)
            ENDS[end]()
        dist.barrier()
        say(seen(lambda: dist.new_group([0, 1])))

    with ForkedRanks(3, story) as ranks:
        begun = ranks[1].hear()
        for rank in ranks.others(1):
            heard = rank.hear()
            assert (heard.kind, heard.ranks) == (PeerLostError, (1,)), heard
            assert "group_1" in heard.text
            assert heard.when - begun < 0.3 + 2.0
        ranks[1].kill()


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_leaving_instead_of_new_group(backend: str, tmp_path: Path) -> None:
    def story(rank: int, say: Say) -> None:
        init(rank, 2, dist.FileStore(tmp_path / "store"), backend)
        if rank == 1:
            os._exit(0)
        heard = seen(dist.new_group)
        say((heard.kind, heard.ranks))

    with ForkedRanks(2, story) as ranks:
        assert ranks[0].hear() == (PeerLostError, (1,))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_collective_instead_of_new_group(asynchronous: bool, tmp_path: Path) -> None:
    def collective() -> None:
        work = dist.all_reduce(torch.ones(3), async_op=asynchronous)
        if work is not None:
            work.wait()

    def story(rank: int, say: Say) -> None:
        join(rank, 3, tmp_path / "store", LIMIT)
        dist.barrier()
        begun = time.monotonic()
        say((begun, seen(collective if rank == 1 else dist.new_group)))
        time.sleep(3)  # else its end is heard of first

    with ForkedRanks(3, story) as ranks:
        for rank in ranks:
            begun, heard = rank.hear()
            assert heard.kind in (CollectiveMismatchError, PeerLostError), heard
            assert 1 in heard.ranks
            assert "'group_1'" in heard.text
            assert heard.kind is PeerLostError or "all_reduce" in heard.text
            assert heard.when - begun < LIMIT.total_seconds() / 2  # not at the time-out


def test_a_slow_rank_is_waited_for_though_it_has_operations_under_way(tmp_path: Path) -> None:
    def story(rank: int, say: Say) -> None:
        join(rank, 2, tmp_path / "store", LIMIT)
        tensor = torch.ones(3)
        work = dist.all_reduce(tensor, async_op=True) if rank == 1 else None
        if rank == 1:
            time.sleep(1.5)
        dist.new_group()
        work = work or dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
        say(tensor.tolist())

    with ForkedRanks(2, story) as ranks:
        assert [rank.hear() for rank in ranks] == [[2.0] * 3] * 2


LIMITS = {
    "address space": (resource.RLIMIT_AS, 0),
    "descriptors": (resource.RLIMIT_NOFILE, 1),
}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_without_means_is_named_by_all(victim: int, limit: str, tmp_path: Path) -> None:
    def used() -> int:
        if limit == "descriptors":
            return max(int(name) for name in os.listdir("/proc/self/fd"))
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

    def story(rank: int, say: Say) -> None:
        store = dist.FileStore(tmp_path / "store")
        if rank == victim:
            make = getattr(group_plan, MAKE)

            def make_with_nothing(*args: object) -> object:
                number, more = LIMITS[limit]
                hard = resource.getrlimit(number)[1]
                resource.setrlimit(number, (used() + more, hard))
                with contextlib.suppress(OSError):
                    while limit == "descriptors":
                        os.dup(0)  # there may be free ones below the limit
                return make(*args)

            setattr(group_plan, MAKE, make_with_nothing)
        begun = time.monotonic()
        heard = seen(lambda: dist.init_process_group(store=store, rank=rank, world_size=3))
        say((begun, heard))

    with ForkedRanks(3, story) as ranks:
        for rank in ranks:
            begun, heard = rank.hear()
            assert f"rank {victim}" in heard.text, heard
            assert ("memory" if limit == "address space" else "open files") in heard.text.lower()
            assert heard.when - begun < LIMIT.total_seconds() / 2  # not at the time-out
