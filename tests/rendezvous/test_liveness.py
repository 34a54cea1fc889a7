"""Identities of ranks: whether their process or thread has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tilework.rendezvous.liveness import has_ended, process_identity, thread_identity


def test_this_process_and_thread_live() -> None:
    assert not has_ended(process_identity())
    assert not has_ended(thread_identity())
    assert thread_identity() == thread_identity()  # else each group would leave a number


def test_a_thread_that_ended_has_ended() -> None:
    identities: list[str] = []
    thread = threading.Thread(target=lambda: identities.append(thread_identity()))
    thread.start()
    thread.join()
    assert has_ended(identities[0])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_process_has_ended_before_it_is_reaped() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    kind, place, *_ = process_identity().split(" ")
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert has_ended(f"{kind} {place} {child} 1")
    os.waitpid(child, 0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_another_process_with_the_same_number_is_another() -> None:
    kind, place, pid, start, _ = process_identity().split(" ")
    assert has_ended(f"{kind} {place} {pid} {int(start) + 1}")


def test_elsewhere_nothing_is_known() -> None:
    assert not has_ended("process other-boot/1 1 1")
    assert not has_ended("garbage")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_process_tells_its_own_identity() -> None:
    program = "from tilework.rendezvous.liveness import process_identity as i; print(i())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert has_ended(done.stdout.strip())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_process_that_became_another_program_has_ended() -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, process_identity().encode())
        os.execvp("sleep", ["sleep", "300"])
    identity = os.read(reader, 1000).decode()
    deadline = time.monotonic() + 60
    while not has_ended(identity) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert has_ended(identity)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)
