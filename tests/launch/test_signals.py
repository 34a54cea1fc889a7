"""The user, or the machine, ends the launcher: everything ends with it, and nothing stays."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.launch.conftest import Launch, alive, children, wait_for_files, wait_until
from tests.launch.terminal import on_terminal
from tests.limits import PROMPTLY

#: Writes who it is, then waits for a minute.
WAIT = """
    import os, subprocess, time
    open(f"pid-{os.environ['RANK']}", "w").write(str(os.getpid()))
    time.sleep(60)
"""

#: As above, with children: in the rank's group, and in one of their own.
WAIT_WITH_CHILDREN = """
    import os, subprocess, time
    rank = os.environ["RANK"]
    inside = subprocess.Popen(["sleep", "60"])
    outside = subprocess.Popen(["sleep", "60"], start_new_session=True)
    for name, pid in ("pid", os.getpid()), ("inside", inside.pid), ("outside", outside.pid):
        open(f"{name}-{rank}", "w").write(str(pid))
    time.sleep(60)
"""


def pids(launch: Launch, pattern: str, count: int = 2) -> list[int]:
    return [int(text) for text in wait_for_files(launch.folder, pattern, count)]


def all_gone(*found: int) -> bool:
    return wait_until(lambda: not any(map(alive, found)))


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGQUIT, 131)],
)
def test_a_signal_ends_everything_once_and_quietly(
    launch: Launch, number: int, status: int
) -> None:
    process = launch.start("--grace", "60", "-n", "2", launch.script(WAIT))
    ranks = pids(launch, "pid-*")
    process.send_signal(number)
    done = launch.finish(process)
    assert (done.status, done.out, done.err) == (status, "", "")
    assert done.seconds < PROMPTLY
    assert not any(map(alive, ranks))


def test_fresh_interpreters_end_quietly_even_while_they_start(launch: Launch) -> None:
    process = launch.start("-n", "3", "--start", "spawn", launch.script(WAIT))
    assert wait_until(lambda: len(children(process.pid)) == 4)  # the guardian is one
    process.send_signal(signal.SIGINT)
    done = launch.finish(process)
    assert (done.status, done.err) == (130, "")


def test_the_launcher_ends_quietly_while_it_loads(launch: Launch) -> None:
    launch.with_torch()
    process = launch.start("-n", "2", launch.script(WAIT))
    maps = Path(f"/proc/{process.pid}/maps")
    assert wait_until(lambda: "libtorch_cpu" in maps.read_text())
    process.send_signal(signal.SIGINT)
    done = launch.finish(process)
    assert (done.status, done.err) == (130, "")


def test_ctrl_c_lets_the_program_clean_up(launch: Launch, start: str) -> None:
    name = launch.script(
        """
        import os, time
        try:
            open(f"pid-{os.environ['RANK']}", "w").write("up")
            time.sleep(60)
        finally:
            time.sleep(0.2)
            open(f"clean-{os.environ['RANK']}", "w").write("done")
        """
    )
    process = launch.start("-n", "2", "--start", start, name)
    wait_for_files(launch.folder, "pid-*", 2)
    process.send_signal(signal.SIGINT)
    assert launch.finish(process).status == 130
    assert wait_for_files(launch.folder, "clean-*", 2) == ["done", "done"]


def test_a_rank_that_ignores_ctrl_c_is_killed_in_time(launch: Launch) -> None:
    name = launch.script(
        """
        import os, signal, time
        for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)
        open(f"pid-{os.environ['RANK']}", "w").write(str(os.getpid()))
        time.sleep(60)
        """
    )
    process = launch.start("-n", "2", name)
    ranks = pids(launch, "pid-*")
    process.send_signal(signal.SIGINT)
    done = launch.finish(process)
    assert (done.status, done.err) == (130, "")
    assert done.seconds < PROMPTLY
    assert not any(map(alive, ranks))


def test_ctrl_c_twice_kills_at_once(launch: Launch) -> None:
    name = launch.script(
        """
        import os, signal, time
        for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)
        open(f"pid-{os.environ['RANK']}", "w").write(str(os.getpid()))
        time.sleep(60)
        """
    )
    process = launch.start("--grace", "60", "-n", "2", name)
    pids(launch, "pid-*")
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    done = launch.finish(process)
    assert (done.status, done.err) == (130, "")
    assert done.seconds < PROMPTLY


def test_ctrl_c_on_a_terminal(launch: Launch, start: str) -> None:
    with on_terminal(launch, "-n", "2", "--start", start, launch.script(WAIT)) as terminal:
        ranks = pids(launch, "pid-*")
        terminal.press(b"\x03")
        assert terminal.finish() == 130
        assert terminal.shown == b"^C" or terminal.shown == b""
        assert not any(map(alive, ranks))


def test_ctrl_z_stops_the_ranks_and_continuing_wakes_them(launch: Launch) -> None:
    process = launch.start("-n", "2", launch.script(WAIT))
    ranks = pids(launch, "pid-*")

    def states() -> set[str]:
        texts = [Path(f"/proc/{pid}/stat").read_text() for pid in (process.pid, *ranks)]
        return {text.rpartition(")")[2].split()[0] for text in texts}

    process.send_signal(signal.SIGTSTP)
    assert wait_until(lambda: states() == {"T"})
    process.send_signal(signal.SIGCONT)
    assert wait_until(lambda: "T" not in states())
    process.terminate()
    assert launch.finish(process).status == 143


# The launcher is killed


def test_kill_9_of_the_launcher_ends_ranks_and_their_children(launch: Launch, start: str) -> None:
    process = launch.start("-n", "2", "--start", start, launch.script(WAIT_WITH_CHILDREN))
    ranks, inside = pids(launch, "pid-*"), pids(launch, "inside-*")
    outside = pids(launch, "outside-*")
    process.kill()
    try:
        assert all_gone(*ranks, *inside)
    finally:
        for pid in outside:  # in groups of their own: nobody can know of them any more
            os.kill(pid, signal.SIGKILL)


def test_kill_9_of_the_launcher_while_ranks_start(launch: Launch) -> None:
    process = launch.start("-n", "3", "--start", "spawn", launch.script(WAIT))
    assert wait_until(lambda: len(children(process.pid)) >= 3)
    started = children(process.pid)
    process.kill()
    assert all_gone(*started)


def test_without_its_guardian_the_kernel_still_ends_the_ranks(launch: Launch) -> None:
    process = launch.start("-n", "2", launch.script(WAIT))
    ranks = pids(launch, "pid-*")
    (guardian,) = set(children(process.pid)) - set(ranks)
    assert b"tilework-guardian" in Path(f"/proc/{guardian}/cmdline").read_bytes()
    os.kill(guardian, signal.SIGKILL)
    process.kill()
    assert all_gone(*ranks)


# Nothing is left behind


def test_what_ranks_leave_running_is_ended(launch: Launch) -> None:
    done = launch(
        """
        import os, subprocess
        for own_group in (True, False):
            child = subprocess.Popen(["sleep", "60"], start_new_session=own_group)
            child.returncode = 0  # no complaint about leaving it
            open(f"pid-{os.environ['RANK']}-{own_group}", "w").write(str(child.pid))
        """
    )
    children = pids(launch, "pid-*", 4)
    assert not any(map(alive, children))
    assert done.status == 0
    assert all(f"{pid} (sleep)" in done.err for pid in children)


def test_nothing_outlives_a_launcher_that_is_killed(launch: Launch, start: str) -> None:
    """Neither a daemon, which has forked twice and left its session, nor what it has started."""
    name = launch.script(
        """
        import os, subprocess, time
        rank = os.environ["RANK"]

        def note(name):
            open(f"part-{name}-{rank}", "w").write(str(os.getpid()))
            os.rename(f"part-{name}-{rank}", f"pid-{name}-{rank}")

        for name in ("fork", "exec"):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    for fd in range(3, 256):
                        try:
                            os.close(fd)
                        except OSError:
                            pass
                    note(name)
                    if name == "exec":
                        os.execvp("sleep", ["sleep", "60"])
                    time.sleep(60)
                os._exit(0)
        note("rank")
        time.sleep(60)
        """
    )
    process = launch.start("-n", "2", "--start", start, name)
    started = pids(launch, "pid-*", 6)
    assert all(map(alive, started))
    process.kill()
    assert all_gone(*started)


def test_a_stranger_is_spared_when_a_launcher_is_killed(launch: Launch) -> None:
    """Also one that this program has started, beside the launcher."""
    process = launch.start("-n", "2", launch.script(WAIT))
    ranks = pids(launch, "pid-*")
    stranger = subprocess.Popen(["sleep", "60"], start_new_session=True, env=launch.environment)
    try:
        process.kill()
        assert all_gone(*ranks)
        time.sleep(0.3)
        assert alive(stranger.pid)
    finally:
        stranger.kill()
        stranger.wait()


def test_what_ends_by_itself_soon_is_let_finish(launch: Launch) -> None:
    done = launch(
        """
        import subprocess
        child = subprocess.Popen("sleep 0.3; echo finished > late", shell=True)
        child.returncode = 0
        """,
        "-n",
        "1",
    )
    assert (done.status, done.err) == (0, "")
    assert (launch.folder / "late").read_text() == "finished\n"


def test_no_file_socket_or_process_remains(launch: Launch, start: str, tmp_path: Path) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    launch.environment["TMPDIR"] = str(folder)
    name = launch.script(
        """
        import os, sys
        print(os.getpid(), os.getppid(), os.environ["TILEWORK_STORE"].removeprefix("unix:"))
        """
    )
    process = launch.start("-n", "2", "--start", start, name)
    done = launch.finish(process)
    assert not list(folder.iterdir())
    (address,) = {line.split()[3] for line in done.lines}
    assert address not in Path("/proc/net/unix").read_text()
    mine = [int(line.split()[1]) for line in done.lines]
    assert not any(map(alive, mine))
