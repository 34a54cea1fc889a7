"""Events of torch's profiler, taken into the trace of the rank that stops the profiler."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from torch.autograd import profiler

from tilework.comm.world import current_world


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
    """The events of a profile, in order of time."""
    ahead = time.time_ns() - time.monotonic_ns()
    for each in sorted(result.events(), key=lambda event: (event.start_ns(), -event.end_ns())):
        if each.name().startswith("["):  # counters of memory
            continue
        track = f"thread {each.start_thread_id()}"
        if each.device_type().name != "CPU":
            track = f"device {each.device_index()} stream {each.device_resource_id()}"
        yield ProfiledEvent(track, each.name(), each.start_ns() - ahead, each.end_ns() - ahead)
