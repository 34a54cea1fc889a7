"""Launchers on several hosts start the ranks of one job, and hear of each other's ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace

import pytest

from tests.hosts import two_hosts, why_no_hosts
from tests.launch.conftest import Launch, wait_for_files
from tilework.comm.backend import core_error
from tilework.errors import DistNetworkError
from tilework.launch import nodes
from tilework.launch.nodes import Kind, NodeLink, Nodes, NodesError, join_nodes
from tilework.launch.settings import LaunchSettings
from tilework.store import Store

WAIT = """
    import os, sys, time
    rank = os.environ["RANK"]
    open(f"pid-{rank}", "w").write(str(os.getpid()))
    if sys.argv[1:] == [rank]:
        raise ValueError("a bad idea")
    time.sleep(60)
"""


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        number: int = probe.getsockname()[1]
        return number


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWORK_SECRET", raising=False)


def start(
    launch: Launch, port: int, script: str, *arguments: str, ranks: tuple[int, int] = (2, 1)
) -> list[subprocess.Popen[bytes]]:
    """Two launchers of one job, both on this host."""
    rdzv = ("--nnodes", "2", "--rdzv", f"127.0.0.1:{port}", "--timeout", "25")
    return [
        launch.start("-n", str(n), *rdzv, "--node-rank", str(node), script, *arguments)
        for node, n in enumerate(ranks)
    ]


def test_ranks_are_numbered_over_the_nodes(launch: Launch, port: int) -> None:
    script = launch.script(
        """
        import os
        names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE"
        print(*(os.environ[name] for name in names.split()), os.environ["TILEWORK_STORE"])
        """
    )
    done = [launch.finish(each) for each in start(launch, port, script)]
    url = f"tcp://127.0.0.1:{port}"
    assert [each.status for each in done] == [0, 0], done
    assert done[0].lines == [f"[0] 0 0 3 2 0 2 {url}", f"[1] 1 1 3 2 0 2 {url}"]
    assert done[1].lines == [f"[2] 2 0 3 1 1 2 {url}"]


@pytest.mark.parametrize("rank", [0, 2])
def test_an_error_is_printed_once_and_whole(launch: Launch, port: int, rank: int) -> None:
    done = [launch.finish(each) for each in start(launch, port, launch.script(WAIT), str(rank))]
    there = 0 if rank < 2 else 1
    assert [each.status for each in done] == [1, 1]
    assert done[there].err.count("Traceback") == 1
    assert f"rank {rank} failed at script.py:6: ValueError: a bad idea" in done[there].err
    lines = [line for line in done[1 - there].err.splitlines() if "waits for" not in line]
    name = f"node {there} ({socket.gethostname()})"
    assert lines == [f"rank {rank} failed on {name}: ValueError: a bad idea; see there"]


def test_all_end_with_the_exit_status_of_the_rank_that_failed(launch: Launch, port: int) -> None:
    started = start(launch, port, launch.script(WAIT))
    pids = wait_for_files(launch.folder, "pid-*", 3)
    os.kill(int(pids[2]), signal.SIGKILL)
    assert [launch.finish(each).status for each in started] == [137, 137]


@pytest.mark.parametrize("node", [0, 1])
def test_a_launcher_that_is_killed_ends_the_others_ranks(
    launch: Launch, port: int, node: int
) -> None:
    started = start(launch, port, launch.script(WAIT))
    wait_for_files(launch.folder, "pid-*", 3)
    started[node].kill()
    other = launch.finish(started[1 - node])
    assert other.status == 1
    ranks = ("ranks 0 to 1", "rank 2")[node]
    assert f"{ranks} failed: node {node} ({socket.gethostname()}) is gone" in other.err


@pytest.mark.parametrize("node", [0, 1])
def test_ctrl_c_on_either_node_ends_both(launch: Launch, port: int, node: int) -> None:
    started = start(launch, port, launch.script(WAIT))
    wait_for_files(launch.folder, "pid-*", 3)
    started[node].send_signal(signal.SIGINT)
    assert [launch.finish(each).status for each in started] == [130, 130]


def test_a_node_that_ends_early_is_waited_for_by_node_0_only(launch: Launch, port: int) -> None:
    script = launch.script(
        """
        import os, time
        if os.environ["GROUP_RANK"] == os.environ.get("SLOW", "1"):
            time.sleep(0.5)
        open(f"done-{os.environ['RANK']}", "w").write("done")
        """
    )
    started = start(launch, port, script)
    assert [launch.finish(each).status for each in started] == [0, 0]
    assert len(wait_for_files(launch.folder, "done-*", 3)) == 3


def test_a_rank_of_another_node_that_has_ended_is_noted(launch: Launch, port: int) -> None:
    script = launch.script(
        """
        import os, time
        from datetime import timedelta
        from tilework.rendezvous.liveness import EndedRanks
        from tilework.rendezvous.handlers import launcher_store
        if os.environ["RANK"] == "0":
            store = launcher_store(os.environ["TILEWORK_STORE"], timedelta(seconds=120), None)
            until = time.monotonic() + 60
            while not EndedRanks(store).among([1]) and time.monotonic() < until:
                time.sleep(0.02)
            print(EndedRanks(store).among([1]))
        """
    )
    done = [launch.finish(each) for each in start(launch, port, script, ranks=(1, 1))]
    assert (done[0].out, done[0].err) == ("[0] {1}\n", "")


# -- on hosts of their own ------------------------------------------------------------------

REDUCE = """
    import os, time, torch
    import tilework.distributed as dist
    dist.init_process_group()
    x = torch.ones(3)
    dist.all_reduce(x)
    rank = dist.get_rank()
    open(f"pid-{rank}", "w").write(f"{os.getpid()} {dist.get_backend()} {x[0].item():g}")
    while True:
        dist.all_reduce(x, op=dist.ReduceOp.AVG)
        time.sleep(0.01)
"""


@pytest.mark.skipif(core_error() is not None, reason="the core is not built")
@pytest.mark.parametrize("victim", [1, 2])
def test_ranks_on_two_hosts(launch: Launch, port: int, victim: int) -> None:
    """They reduce together, and a rank that is killed on either side ends the job on both."""
    why_not = why_no_hosts()
    if why_not is not None:
        pytest.skip(why_not)
    launch.with_torch()
    script = launch.script(REDUCE)
    with two_hosts() as hosts:
        started = [
            launch.start(
                *("-n", "2", "--nnodes", "2", "--node-rank", str(node)),
                *("--rdzv", f"{hosts[0].address}:29500", "--timeout", "50", script),
                preexec_fn=host.enter,
            )
            for node, host in enumerate(hosts)
        ]
        told = [text.split() for text in wait_for_files(launch.folder, "pid-*", 4)]
        assert [words[1:] for words in told] == [["hybrid", "4"]] * 4
        os.kill(int(told[victim][0]), signal.SIGKILL)
        done = [launch.finish(each) for each in started]
    assert [each.status for each in done] == [137, 137], done
    here = victim // 2
    assert f"rank {victim} failed: SIGKILL" in done[here].err
    assert f"rank {victim} failed on node {here} " in done[1 - here].err
    assert all("Traceback" not in each.err for each in done)


# -- meeting --------------------------------------------------------------------------------


def settings(node: int, port: int, nodes: int = 2, seconds: float = 120.0) -> LaunchSettings:
    rdzv = ("127.0.0.1", port)
    timeout = timedelta(seconds=seconds)
    return LaunchSettings(1, nnodes=nodes, node_rank=node, rdzv=rdzv, timeout=timeout)


@contextlib.contextmanager
def meeting(*asked: LaunchSettings) -> Iterator[list[Nodes | Exception]]:
    """The results of launchers, as threads."""
    results: list[Nodes | Exception] = []

    def join(each: LaunchSettings) -> None:
        try:
            results.append(join_nodes(each))
        except Exception as error:
            results.append(error)

    threads = [threading.Thread(target=join, args=(each,)) for each in asked]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    yield results
    for result in results:
        if isinstance(result, Nodes):
            result.close()
            result.close()


def test_launchers_that_differ_are_told(port: int) -> None:
    with meeting(settings(0, port), settings(1, port, nodes=3)) as results:
        assert [str(result) for result in results] == [
            "the launchers differ in --nnodes: node 0 2, node 1 3"
        ] * 2


def test_launchers_of_different_versions_are_told(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    introduce, one_at_a_time = nodes._Meeting._introduce, threading.Lock()

    def introduce_as_another(self: nodes._Meeting, store: Store) -> None:
        with one_at_a_time, monkeypatch.context() as patched:
            patched.setattr(nodes, "version", lambda: f"1.{self._me}")
            introduce(self, store)

    monkeypatch.setattr(nodes._Meeting, "_introduce", introduce_as_another)
    with meeting(settings(0, port), settings(1, port)) as results:
        assert {str(result) for result in results} == {
            "the launchers differ in their version of tilework: node 0 1.0, node 1 1.1"
        }


def test_a_launcher_that_falls_silent_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("tilework.launch.nodes.time", clock)
    ours, theirs = socket.socketpair()
    link, other = NodeLink(0, ["a", "b"], [1, 1]), NodeLink(1, ["a", "b"], [1, 1])
    link.add(1, ours)
    other.add(0, theirs)
    for _ in range(30):  # one that has not begun yet may be silent
        now += 2.0
        link.beat()
    assert not link.take()
    for _ in range(30):
        now += 2.0
        other.beat()
        link.readers()[ours.fileno()]()
        link.beat()
    assert not link.take()
    for _ in range(12):
        now += 2.0
        link.beat()
    assert link.take() == [{"kind": "lost", "node": 1}]
    other.close()


def test_two_launchers_of_one_number(port: int) -> None:
    asked = [settings(node, port, nodes=3) for node in (0, 1, 1, 2)]
    with meeting(*asked) as results:
        errors = [result for result in results if isinstance(result, Exception)]
        places = sorted(result.place.node for result in results if isinstance(result, Nodes))
    assert places == [0, 1, 2]
    assert len(errors) == 1
    assert "two launchers say that they are node 1" in str(errors[0])


def test_nodes_that_do_not_come(port: int, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NodesError, match=r"node 0 waits for node 1, and gives up after 0\.2 s"):
        join_nodes(settings(0, port, seconds=0.2))
    with pytest.raises(DistNetworkError, match="could not connect to the store"):
        join_nodes(settings(1, port, seconds=0.2))
    assert "waits for node 0" in capfd.readouterr().err


def test_a_secret_keeps_strangers_out(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWORK_SECRET", "xyz")
    with pytest.raises(NodesError, match="hexadecimal"):
        join_nodes(settings(0, port))
    monkeypatch.setenv("TILEWORK_SECRET", "00ff" * 8)
    with meeting(settings(0, port), settings(1, port)) as results:
        assert all(isinstance(result, Nodes) for result in results), results
        assert {result.secret for result in results if isinstance(result, Nodes)} == {"00ff" * 8}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nnodes": 2, "node_rank": 2}, "0 to 1 with 2 nodes, got 2"),
        ({"nnodes": 2}, "--rdzv HOST:PORT"),
        ({"nnodes": 2, "rdzv": ("h", 1), "restarts": 1}, "ranks of one host"),
    ],
)
def test_wrong_settings(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LaunchSettings(nprocs=1, **options)  # type: ignore[arg-type]


# -- messages -------------------------------------------------------------------------------


def star() -> list[NodeLink]:
    """Three nodes' links, in one process."""
    links = [NodeLink(node, ["a", "b", "c"], [1, 2, 3]) for node in range(3)]
    for node in (1, 2):
        here, there = socket.socketpair()
        links[0].add(node, here)
        links[node].add(0, there)
    return links


def pump(link: NodeLink) -> list[object]:
    for read in link.readers().values():
        read()
    return list(link.take())


def test_node_0_passes_on_what_it_hears() -> None:
    links = star()
    links[2].tell(Kind.FAILED, rank=5)
    told = {"kind": "failed", "node": 2, "rank": 5}
    assert pump(links[0]) == [told]
    assert pump(links[1]) == [told]
    links[1].close()
    assert {"kind": "lost", "node": 1} in pump_each(links[0])
    assert links[0].ranks_of(1) == "ranks 1 to 2"
    assert links[0].place_of(1) == "node 1 (b)"
    for link in links:
        link.close()


def test_garbage_is_ignored_and_an_end_after_finishing_is_none() -> None:
    links = star()
    links[1].tell(Kind.FINISHED)
    links[1].close()
    assert links[0].awaits_others
    assert pump_each(links[0]) == [{"kind": "finished", "node": 1}]
    assert pump_each(links[0]) == []
    links[2].tell(Kind.FINISHED)
    pump_each(links[0])
    assert not links[0].awaits_others
    for link in links:
        link.close()


def pump_each(link: NodeLink) -> list[object]:
    """As ``pump``, where some connections may have nothing to read."""
    for fd, read in link.readers().items():
        with contextlib.closing(socket.socket(fileno=os.dup(fd))) as sock:
            sock.setblocking(False)
            try:
                sock.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                continue
            finally:
                sock.setblocking(True)
        read()
    return list(link.take())
