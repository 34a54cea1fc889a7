"""Processes of multiprocessing that end without a word are missed where each must be a rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tilework.rendezvous.liveness import process_identity, thread_identity
from tilework.rendezvous.siblings import MultiprocessingChildren

#: Three processes, of which one ends; the others, which know each other, then count the missing.
PROGRAM = r"""
import multiprocessing, multiprocessing.connection, os, sys, time
from tilework.rendezvous import siblings
from tilework.rendezvous.liveness import process_identity

method, when, victim, size, looks = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
siblings._GONE_SECONDS = siblings._DOUBT_SECONDS = 0.0

def main(rank, seen, identities, known, ended):
    if rank == victim:
        if when == "once seen":
            seen.acquire()
            seen.acquire()
        return
    processes = siblings.MultiprocessingChildren.of_this_process()
    while when == "once seen" and len(processes._seen) < 3:
        processes.look()
    if when == "once seen":
        assert processes.ended(3, [process_identity()], 2) == 0
    seen.release()
    identities.put(process_identity())
    came = known.get()
    ended.wait()
    for _ in range(looks):
        count = processes.ended(size, came, 1)
        if count:
            break
        time.sleep(0.01)
    os.write(1, f"{rank} misses {count}\n".encode())

if __name__ == "__main__":
    context = multiprocessing.get_context(method)
    identities, known = context.SimpleQueue(), context.SimpleQueue()
    seen, ended = context.Semaphore(0), context.Event()
    arguments = seen, identities, known, ended
    processes = [context.Process(target=main, args=(rank, *arguments)) for rank in range(3)]
    for process in processes:
        process.start()
    came = [identities.get(), identities.get()]
    for _ in came:
        known.put(came)
    if when != "not reaped":
        processes[victim].join()
    else:
        multiprocessing.connection.wait([processes[victim].sentinel])
    ended.set()
    for process in processes:
        process.join()
"""


def output(folder: Path, *arguments: object) -> list[str]:
    """The lines of the processes, in the order of their ranks."""
    program = folder / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return sorted(done.stdout.splitlines())


@pytest.mark.parametrize(
    ("method", "when", "victim"),
    [
        *(("fork", "once seen", 2), ("spawn", "once seen", 0), ("forkserver", "once seen", 1)),
        # Nobody has seen it: others were numbered after it, or its parent has not reaped it.
        *(("fork", "at once", 0), ("fork", "not reaped", 2)),
    ],
)
def test_one_that_ends_is_missed_by_those_that_were_started_with_it(
    method: str, when: str, victim: int, tmp_path: Path
) -> None:
    lines = output(tmp_path, method, when, victim, 3, 3000)
    assert lines == [f"{rank} misses 1" for rank in range(3) if rank != victim]


def test_none_is_missed_where_there_are_not_as_many_as_ranks(tmp_path: Path) -> None:
    assert output(tmp_path, "fork", "once seen", 2, 4, 20) == ["0 misses 0", "1 misses 0"]


def test_a_process_without_kin_misses_none() -> None:
    children = MultiprocessingChildren()
    assert children.ended(1, [process_identity()], 0) == 0
    assert children.ended(2, [process_identity()], 1) == 0
    assert children.ended(1, [thread_identity()], 0) == 0


FORKED = """
import multiprocessing, os
from tilework.rendezvous.siblings import _own_number

def main():
    print(_own_number(), flush=True)
    if os.fork():
        os.wait()
    else:
        print(_own_number(), flush=True)

if __name__ == "__main__":
    process = multiprocessing.get_context("forkserver").Process(target=main)
    process.start()
    process.join()
"""


def test_a_fork_of_the_fork_servers_child_has_no_number_of_multiprocessing(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(FORKED)
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["1", "0"], done.stderr
