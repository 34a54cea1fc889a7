"""Threads that may still call operations, and those that will not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from tilework.comm.waits.cycles import may_call


@contextmanager
def _running(thread: threading.Thread, end: Callable[[], object]) -> Iterator[None]:
    thread.start()
    try:
        yield
    finally:
        end()
        thread.join()


def test_a_thread_with_code_of_the_programs_may() -> None:
    bystanders, over = threading.enumerate(), threading.Event()

    def code() -> None:
        over.wait()

    thread = threading.Thread(target=code)
    with _running(thread, over.set):
        assert may_call(bystanders)
        assert not may_call([*bystanders, thread])


def test_a_timer_may_since_it_will_run_something() -> None:
    bystanders = threading.enumerate()
    timer = threading.Timer(600.0, print)
    with _running(timer, timer.cancel):
        assert may_call(bystanders)


def test_an_idle_thread_of_a_pool_will_not() -> None:
    bystanders = threading.enumerate()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(len, "").result()
        deadline = time.monotonic() + 60.0
        while may_call(bystanders) and time.monotonic() < deadline:
            time.sleep(0.01)  # it may be on its way out of the task
        assert not may_call(bystanders)


def test_the_calling_thread_does_not_count() -> None:
    assert not may_call([t for t in threading.enumerate() if t is not threading.current_thread()])
