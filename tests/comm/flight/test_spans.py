"""Spans: nothing unless the rank is traced."""

from __future__ import annotations

import tilework.distributed as dist
from tilework.comm.world import current_world
from tilework.testing import run_ranks


class _Sink:
    def __init__(self) -> None:
        self.told: list[str] = []

    def see(self, record: object) -> None: ...

    def begin(self, name: str) -> None:
        self.told.append(name)

    def end(self) -> None:
        self.told.append("end")


def test_spans_go_to_the_sink_of_the_rank() -> None:
    def program(rank: int) -> list[str]:
        sink = _Sink()
        if rank == 0:
            current_world().sink = sink
        with dist.span("step"), dist.span("forward"):
            pass
        return sink.told

    assert run_ranks(2, program) == [["step", "forward", "end", "end"], []]
