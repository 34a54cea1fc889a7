"""Hooks of torch, wrapped once and for good: events of the profiler, steps of optimizers."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from torch.autograd import profiler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tilework.comm.world import World, current_world


class ProfiledEvent(NamedTuple):
    """An event: the track that torch has it on, the name, and nanoseconds of the monotonic clock.

    Torch's times are those of the wall clock.
    """

    track: str
    name: str
    start: int
    end: int


@cache
def follow_profiler() -> None:
    """From now on, give events to the sink of the rank that stops the profiler.

    Torch has no hook for this, so this wraps the function by which torch stops.
    """
    module: Any = profiler
    stop = module._disable_profiler

    def stop_and_tell() -> Any:
        result = stop()
        take = getattr(current_world().sink, "take_profile", None)
        if take is not None:
            take(_events_of(result))
        return result

    module._disable_profiler = stop_and_tell


def _events_of(result: Any) -> Iterator[ProfiledEvent]:
    ahead = time.time_ns() - time.monotonic_ns()
    for each in sorted(result.events(), key=lambda event: (event.start_ns(), -event.end_ns())):
        if each.name().startswith("["):  # counters of memory
            continue
        track = f"thread {each.start_thread_id()}"
        if each.device_type().name != "CPU":
            track = f"device {each.device_index()} stream {each.device_resource_id()}"
        yield ProfiledEvent(track, each.name(), each.start_ns() - ahead, each.end_ns() - ahead)


@cache
def count_steps() -> None:
    """Count, from now on, the steps of the optimizer that steps most often. Local.

    The rank's flight records have the number, and ``tilework run --watch`` shows it. In a trace
    they separate steps. The hook stays: other ranks of the process may go through torch's now.
    """
    steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
    most: weakref.WeakKeyDictionary[World, int] = weakref.WeakKeyDictionary()

    def count(optimizer: Optimizer, *_: object) -> None:
        world = current_world()
        steps[optimizer] = mine = steps.get(optimizer, 0) + 1
        if mine > most.get(world, 0):
            most[world] = mine
            world.notes.steps += 1
            note = getattr(world.sink, "note_step", None)  # a trace's sink
            if note is not None:
                note()

    register_optimizer_step_post_hook(count)
