"""``spawn()``: ranks of a program that goes on."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
from datetime import timedelta
from pathlib import Path

import pytest

from tests.launch import rank_functions
from tests.launch.conftest import alive, wait_for_files, wait_until
from tilework.errors import RankFailedError
from tilework.launch import spawn, supervise
from tilework.launch.settings import StartMethod

METHODS: list[StartMethod] = ["spawn", "fork"]


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> StartMethod:
    chosen: StartMethod = request.param
    return chosen


@pytest.fixture(autouse=True)
def no_threads_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide them: compilers leave some, idle, for the life of the process; spawn() warns of any."""
    everyone, before = threading.enumerate, set(threading.enumerate())
    before.discard(threading.current_thread())
    monkeypatch.setattr(threading, "enumerate", lambda: [t for t in everyone() if t not in before])


def test_every_rank_is_called_with_its_environment(tmp_path: Path, method: StartMethod) -> None:
    spawn(
        rank_functions.write_environment,
        (tmp_path,),
        2,
        start=method,
        backend="gloo",
        timeout=timedelta(seconds=9),
    )
    assert wait_for_files(tmp_path, "rank-*", 2) == ["0 0 2 gloo 9", "1 1 2 gloo 9"]


def test_failure_carries_the_traceback(tmp_path: Path, method: StartMethod) -> None:
    with pytest.raises(RankFailedError, match=r"(?s)^rank 1 failed at .*in fail_at") as caught:
        spawn(rank_functions.fail_at, (1, tmp_path), 3, start=method)
    assert (caught.value.rank, caught.value.exitcode) == (1, 1)
    assert not any(alive(int(path.read_text() or 0)) for path in tmp_path.glob("pid-*"))


@pytest.mark.parametrize(
    ("how", "code", "text"), [("kill", -9, "SIGKILL"), ("exit", 5, "exit code 5")]
)
def test_death_without_a_traceback(how: str, code: int, text: str) -> None:
    with pytest.raises(RankFailedError, match=f"rank 0 failed: {text}") as caught:
        spawn(rank_functions.end_by, (how,), 1, start="fork")
    assert caught.value.exitcode == code


def test_large_arguments() -> None:
    spawn(rank_functions.check_size, (bytes(1 << 20),), 2)


def test_without_joining(tmp_path: Path, method: StartMethod) -> None:
    with spawn(rank_functions.wait, (tmp_path,), 2, start=method, join=False) as ranks:
        wait_for_files(tmp_path, "pid-*", 2)
        assert not ranks.join(timedelta(seconds=0.1))
        pids = ranks.pids
        assert all(map(alive, pids))
    assert not any(map(alive, pids))


def test_joining_later(tmp_path: Path) -> None:
    ranks = spawn(rank_functions.fail_at, (0, tmp_path), 2, start="fork", join=False)
    with pytest.raises(RankFailedError, match="at rank 0"):
        ranks.join()
    ranks.close()


def test_joining_twice_keeps_the_results() -> None:
    with spawn(abs, nprocs=2, start="fork", join=False) as ranks:
        assert [ranks.join(), ranks.join()] == [True, True]
        assert ranks.results == [0, 1]


def test_joining_without_time_sees_that_ranks_have_ended() -> None:
    with spawn(abs, nprocs=2, start="fork", join=False) as ranks:
        assert wait_until(lambda: ranks.join(timedelta(0)))
        assert ranks.results == [0, 1]


def test_a_failure_of_a_process_that_the_program_reaped(tmp_path: Path) -> None:
    ranks = spawn(rank_functions.fail_at, (0, tmp_path), 1, start="fork", join=False)
    os.waitpid(ranks.pids[0], 0)
    with pytest.raises(RankFailedError, match="at rank 0"):
        ranks.join()
    ranks.close()


def test_from_another_thread(tmp_path: Path) -> None:
    thread = threading.Thread(
        target=spawn, args=(rank_functions.end_by, ("not at all",), 2), kwargs={"start": "spawn"}
    )
    thread.start()
    thread.join(120)
    assert not thread.is_alive()


def test_function_that_cannot_be_pickled() -> None:
    with pytest.raises(TypeError, match=r'must be picklable: .* or use start="fork"'):
        spawn(threading.Lock().acquire)


def test_arguments_that_cannot_be_pickled() -> None:
    for value in (multiprocessing.Lock(), ctypes.pointer(ctypes.c_int())):
        with pytest.raises(TypeError, match="must be picklable"):
            spawn(print, (value,))


def test_function_that_can_only_be_forked() -> None:
    value = threading.Lock()
    spawn(lambda rank: value.acquire(), nprocs=2, start="fork")


def test_forking_a_program_with_threads_is_warned_of() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="waiter")
    thread.start()
    try:
        with pytest.warns(RuntimeWarning, match="forks a program that has 2 threads .also waiter"):
            spawn(rank_functions.end_by, ("not at all",), start="fork")
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nprocs": 0}, "must be at least 1, got 0"),
        ({"start": "forkserver"}, 'the start method is "fork" or "spawn"'),
        ({"backend": "smh"}, "did you mean 'shm'"),
        ({"timeout": timedelta(0)}, "must be longer than 0 s"),
    ],
)
def test_wrong_use(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spawn(print, **arguments)  # type: ignore[call-overload]


def test_descriptors_and_children_are_given_back(tmp_path: Path, method: StartMethod) -> None:
    def open_now() -> set[tuple[str, str]]:
        found = set()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of the listing itself
                found.add((name, os.readlink(f"/proc/self/fd/{name}")))
        return found

    def children() -> set[str]:
        return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())

    spawn(rank_functions.end_by, ("not at all",), 1, start=method)
    gc.collect()
    before = open_now(), children()
    for _ in range(2):
        spawn(rank_functions.end_by, ("not at all",), 2, start=method)
    # What other tests left behind may have been collected meanwhile: none may be new.
    assert open_now() <= before[0]
    assert children() <= before[1]


PROGRAM = """
    import os, sys, time
    from tilework.launch import spawn

    def work(rank):
        open(f"pid-{rank}", "w").write(str(os.getpid()))
        time.sleep(60)

    if __name__ == "__main__":
        spawn(work, nprocs=2, start=sys.argv[1], join=sys.argv[2] == "join")
        while not (os.path.exists("pid-0") and os.path.exists("pid-1")):
            time.sleep(0.01)
"""


def program(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(textwrap.dedent(PROGRAM))
    return subprocess.Popen(
        [sys.executable, "program.py", *arguments],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_no_rank_outlives_its_program(tmp_path: Path, method: StartMethod, how: int) -> None:
    with program(tmp_path, method, "join") as process:
        pids = [int(text) for text in wait_for_files(tmp_path, "pid-*", 2)]
        process.send_signal(how)
        process.wait(40)
        assert wait_until(lambda: not any(map(alive, pids)))
        assert process.stderr is not None
        text = process.stderr.read()
        assert text.count("KeyboardInterrupt") == (how == signal.SIGINT)


def test_a_program_that_ends_without_joining_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with program(tmp_path, "spawn", "leave") as process:
        assert process.wait(40) == 0
        pids = [int(text) for text in wait_for_files(tmp_path, "pid-*", 2)]
        assert wait_until(lambda: not any(map(alive, pids)))
        assert wait_until(lambda: not list(tmp_path.glob("tilework-*/")))


def test_a_program_without_its_guard_is_told(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "from tilework.launch import spawn\ndef work(rank): pass\nspawn(work, nprocs=2)\n"
    )
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 1
    assert 'under if __name__ == "__main__":' in done.stderr


def test_a_program_from_stdin_can_spawn_what_it_imports(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-"],
        input="from tilework.launch import spawn\nspawn(print, ('hello',), 1)\n",
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.stdout, done.stderr) == ("0 hello\n", "")


def test_torchs_arguments_are_taken() -> None:
    spawn(print, ("here",), 1, True, False, "fork")
    ranks = spawn(print, ("here",), nprocs=1, join=False, start_method="fork")
    with ranks:
        assert ranks.join()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_rank_that_is_stopped_when_all_others_have_finished_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervise, "_STOPPED_SECONDS", 0.2)
    with pytest.raises(RankFailedError, match=r"rank 1 .*SIGSTOP.*all others have finished"):
        spawn(rank_functions.stop_on_one, nprocs=2)


def test_results_are_returned(method: StartMethod) -> None:
    nothing, tensor = spawn(rank_functions.return_tensor, (5,), nprocs=2, start=method)
    assert nothing is None
    assert tensor is not None
    assert tensor.tolist() == [5, 5]


def test_a_result_that_cannot_be_pickled_is_an_error(method: StartMethod) -> None:
    with pytest.raises(RankFailedError, match="must be picklable"):
        spawn(threading.Semaphore, nprocs=1, start=method)
