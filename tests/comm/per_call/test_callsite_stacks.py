"""Stacks of threads: ``tilework.comm.per_call.callsite``."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable
from types import FrameType

from tilework.comm.per_call.callsite import stacks_of_threads
from tilework.testing import run_ranks

FUNCTIONS: list[Callable[[int], int]] = []


def _function(size: int) -> Callable[[int], int]:
    """A function whose frame has ``size`` variables, so that frames do not lie upon each other."""
    lines = ["def function(depth):", *(f"    v{i} = [depth]" for i in range(size))]
    names: dict[str, Callable[[int], int]] = {"call": _call}
    exec("\n".join([*lines, "    return call(depth)"]), names)
    return names["function"]


def _call(depth: int) -> int:
    return random.choice(FUNCTIONS)(depth - 1) if depth > 0 else 0


FUNCTIONS += [_function(size) for size in range(12)]


def test_frames_of_threads_that_run_are_frames() -> None:
    """With finalizers that let other threads run, most walks met other objects in Python 3.11."""

    def program(rank: int) -> int:
        ended, walker, walks = threading.Event(), threading.get_ident(), 0

        def run() -> None:
            while not ended.is_set():
                _call(12)

        def collected(phase: str, info: dict[str, int]) -> None:
            if threading.get_ident() == walker:
                time.sleep(0.0002)

        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        gc.callbacks.append(collected)
        gc.set_threshold(5)
        until = time.monotonic() + 0.5
        while time.monotonic() < until or walks < 20:
            walks += 1
            stacks = stacks_of_threads()
            assert {thread.ident for thread in threads} <= {*stacks}
            assert all(isinstance(frame, FrameType) for stack in stacks.values() for frame in stack)
        ended.set()
        return walks

    assert run_ranks(1, program, kind="processes")[0] >= 20


def test_frames_are_innermost_first_and_collection_goes_on() -> None:
    names = [frame.f_code.co_name for frame in stacks_of_threads()[threading.get_ident()]]
    own = names.index("test_frames_are_innermost_first_and_collection_goes_on")
    assert names.index("stacks_of_threads") < own < len(names) - 1
    assert gc.isenabled()
    gc.disable()
    try:
        stacks_of_threads()
        assert not gc.isenabled()
    finally:
        gc.enable()
