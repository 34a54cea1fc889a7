"""A rank fails: the cause is shown, the others end, the exit status is that rank's."""

from __future__ import annotations

import resource

import pytest

from tests.launch.conftest import Launch, alive

#: Ranks but the last one would run for a minute.
LAST_RANK = """
    import os, signal, sys, time
    open(f"pid-{{os.environ['RANK']}}", "w").write(str(os.getpid()))
    if os.environ["RANK"] == "2":
        {what}
    time.sleep(600)
"""


def ranks_left(launch: Launch) -> list[int]:
    pids = [path.read_text() for path in launch.folder.glob("pid-*")]
    return [int(pid) for pid in pids if pid and alive(int(pid))]


@pytest.mark.parametrize(
    ("what", "status", "headline"),
    [
        ("1 / 0", 1, "rank 2 failed at script.py:5: ZeroDivisionError: division by zero\n"),
        ("sys.exit(3)", 3, "rank 2 failed: exit code 3"),
        ("os._exit(4)", 4, "rank 2 failed: exit code 4"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "rank 2 failed: SIGKILL (somebody killed"),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143, "rank 2 failed: SIGTERM"),
        ("import ctypes; ctypes.string_at(0)", 139, "rank 2 failed: SIGSEGV"),
        ("raise KeyboardInterrupt", 130, "rank 2 failed: exit code 130"),
    ],
)
def test_first_failure_ends_the_job(launch: Launch, what: str, status: int, headline: str) -> None:
    done = launch(LAST_RANK.format(what=what), "-n", "3")
    assert done.status == status
    assert headline in done.err
    assert not ranks_left(launch)


def test_traceback_is_the_programs_own(launch: Launch, start: str) -> None:
    done = launch(
        """
        def inner():
            raise ValueError("first\\nsecond")
        inner()
        """,
        "-n",
        "1",
        "--start",
        start,
    )
    script = launch.folder / "script.py"
    # Python 3.13 underlines the call as well.
    lines = [line for line in done.err.splitlines() if not set(line) <= set(" ~^")]
    assert lines == [
        "rank 0 failed at script.py:3: ValueError: first",
        "  Traceback (most recent call last):",
        f'    File "{script}", line 4, in <module>',
        "      inner()",
        f'    File "{script}", line 3, in inner',
        '      raise ValueError("first\\nsecond")',
        "  second",
    ]


def test_syntax_error(launch: Launch) -> None:
    done = launch("def broken(:\n    pass", "-n", "1")
    assert done.status == 1
    assert 'script.py", line 1' in done.err
    assert "launch/program.py" not in done.err


def test_crash_shows_where_it_was(launch: Launch, start: str) -> None:
    done = launch(
        """
        import ctypes
        def crash():
            ctypes.string_at(0)
        crash()
        """,
        "-n",
        "1",
        "--start",
        start,
    )
    assert "Fatal Python error: Segmentation fault" in done.err
    assert 'script.py", line 4 in crash' in done.err
    assert "launch/" not in done.err


def test_what_the_rank_wrote_comes_before_its_traceback(launch: Launch) -> None:
    done = launch("import sys; print('before', file=sys.stderr); 1 / 0", "-n", "1")
    assert done.err.index("before") < done.err.index("ZeroDivisionError")


def test_rank_that_ignores_sigterm_is_killed_in_time(launch: Launch) -> None:
    done = launch(
        """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(f"pid-{os.environ['RANK']}", "w").write(str(os.getpid()))
        while not os.path.exists("pid-0") or not os.path.exists("pid-1"): time.sleep(0.01)
        if os.environ["RANK"] == "1":
            raise RuntimeError("stop")
        time.sleep(600)
        """
    )

    assert done.status == 1
    assert not ranks_left(launch)


def test_stopped_rank_is_ended_as_well(launch: Launch) -> None:
    done = launch(
        LAST_RANK.format(what="time.sleep(0.2); 1 / 0").replace(
            "time.sleep(60)", "os.kill(os.getpid(), signal.SIGSTOP)"
        ),
        "-n",
        "3",
    )
    assert done.status == 1
    assert not ranks_left(launch)


def test_rank_may_clean_up_on_sigterm(launch: Launch) -> None:
    launch(
        """
        import os, signal, sys, time
        if os.environ["RANK"] == "1":
            while not os.path.exists("ready"): time.sleep(0.01)
            sys.exit(1)
        def save(*_):
            time.sleep(0.3)
            open("saved", "w")
            sys.exit()
        signal.signal(signal.SIGTERM, save)
        open("ready", "w")
        time.sleep(60)
        """
    )
    assert (launch.folder / "saved").exists()


def test_failed_rank_that_hangs_at_exit_does_not_hang_the_job(launch: Launch) -> None:
    done = launch(
        """
        import os, threading, time
        threading.Thread(target=time.sleep, args=(600,)).start()
        raise ValueError("and a thread that is never done")
        """
    )
    assert done.status == 1
    assert "ValueError: and a thread" in done.err


def test_cause_is_preferred_to_a_consequence_that_came_first(launch: Launch) -> None:
    done = launch(
        """
        import os, time
        from tilework.errors import PeerLostError
        if os.environ["RANK"] == "0":
            raise PeerLostError("rank 1 is gone", ranks=[1])
        time.sleep(0.2)
        raise ValueError("the cause")
        """
    )
    first, *_, last = done.err.splitlines()
    assert first == "rank 1 failed at script.py:7: ValueError: the cause"
    assert last == "then failed rank 0: PeerLostError"


def test_peers_death_is_preferred_to_its_consequence(launch: Launch) -> None:
    done = launch(
        """
        import os, signal, time
        mine, other = [f"pid-{(int(os.environ['RANK']) + i) % 2}" for i in range(2)]
        open(mine, "w").write(str(os.getpid()))
        time.sleep(0.2)
        if os.environ["RANK"] == "0":
            os.kill(int(open(other).read()), signal.SIGKILL)
            raise ConnectionResetError("by peer")
        time.sleep(60)
        """
    )
    assert done.status == 137
    assert done.err.startswith("rank 1 failed: SIGKILL")


def test_same_failures_are_told_in_one_line(launch: Launch) -> None:
    done = launch("import time; time.sleep(0.3); raise ValueError('all of us')", "-n", "3")
    assert done.err.count("ValueError: all of us") <= 3


def test_tracebacks_are_whole_however_many_ranks_fail(launch: Launch) -> None:
    done = launch("def f(n): f(n - 1) if n else 1 / 0\nf(50)", "-n", "4", "--log-dir", "logs")
    traces = [path.read_text() for path in launch.folder.glob("logs/*.stderr")]
    assert done.status == 1
    told = [trace for trace in traces if trace]
    assert told
    assert {trace.count("Traceback") for trace in told} == {1}
    assert all(trace.endswith("division by zero\n") for trace in told)


def test_error_that_cannot_be_shown(launch: Launch) -> None:
    done = launch(
        """
        class Broken(Exception):
            def __str__(self): raise ValueError
        raise Broken
        """,
        "-n",
        "1",
    )
    assert done.status == 1
    assert "rank 0 failed at script.py:4: Broken: (its message cannot be shown)" in done.err


def test_hook_of_the_program_runs(launch: Launch) -> None:
    done = launch(
        """
        import sys
        sys.excepthook = lambda kind, error, trace: open("hook", "w").write(kind.__name__)
        1 / 0
        """,
        "-n",
        "1",
    )
    assert (launch.folder / "hook").read_text() == "ZeroDivisionError"
    assert "rank 0 failed at script.py:4: ZeroDivisionError" in done.err


def test_a_traceback_is_printed_once_although_torch_has_a_hook(launch: Launch) -> None:
    done = launch(
        """
        import sys

        def init_process_group(old_hook):
            def hook(*error):
                old_hook(*error)
            hook.__module__ = "torch.distributed.distributed_c10d"
            return hook

        if sys.argv[1:] == ["own"]:
            sys.excepthook = lambda kind, error, trace: print("own hook", file=sys.stderr)
        sys.excepthook = init_process_group(sys.excepthook)
        raise ValueError("once")
        """,
        "-n",
        "1",
    )
    assert done.err.count("Traceback") == 1
    own = launch.finish(launch.start("-n", "1", "script.py", "own"))
    assert own.err.count("Traceback") == 1
    assert own.err.count("own hook") == 1


def test_failed_start_is_told_and_leaves_nothing(launch: Launch) -> None:
    name = launch.script(LAST_RANK.format(what="pass"))
    few = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))  # noqa: E731
    done = launch.finish(launch.start("-n", "12", name, preexec_fn=few))
    assert (done.status, done.err) == (1, "tilework run: cannot start: Too many open files\n")
    assert not ranks_left(launch)


def test_all_ranks_start_again(launch: Launch) -> None:
    script = """
        import os
        attempts = open(f"attempts-{os.environ['RANK']}", "a+")
        attempts.write("x")
        assert os.environ["RANK"] == "0" or attempts.tell() == 3, "not yet"
    """
    done = launch(script, "-n", "2", "--max-restarts", "2")
    assert done.status == 0
    assert "tilework: all ranks start again (2 of 2 restarts)" in done.err
    assert launch(script, "-n", "2", "--max-restarts", "1").status == 1


def test_a_signal_while_a_failed_attempt_ends_is_not_lost(launch: Launch) -> None:
    script = """
        import os, signal, sys, time
        if os.environ["RANK"] == "0":
            while not os.path.exists("ready"):
                time.sleep(0.01)
            sys.exit(3)
        ended = []
        end = lambda *_: ended.append(os.kill(os.getppid(), signal.SIGTERM))
        signal.signal(signal.SIGTERM, end)
        open("ready", "w").close()
        while not ended:
            time.sleep(0.01)
        time.sleep(0.2)  # the launcher may read the signal, or come to the end before
    """
    done = launch(script, "-n", "2", "--max-restarts", "5")
    assert done.status == 3
    assert "start again" not in done.err
