"""The report of a step: buckets, when each was ready and reduced, and what was overlapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tilework.show import Page, Span, TextTable, timeline

#: The colour and the name of each kind of span in the picture.
_KINDS = {
    "backward": ("#60a5fa", "backward"),
    "waiting": ("#f59e0b", "waits for reductions"),
    "ready": ("#9ca3af80", "ready, not started"),
    "reduced": ("#34d399", "being reduced"),
}


@dataclass
class BucketTimes:
    """Times by perf_counter at which a bucket was ready, was started, was seen to be reduced."""

    ready: float = 0.0
    started: float = 0.0
    reduced: float = 0.0


@dataclass
class PassTimes:
    """Times at which a backward pass started, had ``computed``, ``ended``; seconds ``blocked``."""

    started: float
    computed: float = 0.0
    ended: float = 0.0
    blocked: float = 0.0
    buckets: list[BucketTimes] = field(default_factory=list)


@dataclass(frozen=True)
class BucketReport:
    """A bucket of the last backward pass.

    Attributes:
        index: The bucket's place in the order of reduction.
        parameters: The names of the bucket's parameters, in the order in memory.
        size_bytes: The bytes that are reduced.
        dtype: The dtype of the reduction.
        ready_ms: Milliseconds from the start of the pass until the last gradient was computed.
        started_ms: ... until the reduction was started.
        reduced_ms: ... until the reduction was known to be done.
    """

    index: int
    parameters: tuple[str, ...]
    size_bytes: int
    dtype: str
    ready_ms: float
    started_ms: float
    reduced_ms: float


@dataclass(frozen=True)
class StepReport:
    """The last backward pass of a DistributedDataParallel module on this rank.

    ``print`` shows it as a table; :meth:`timeline` draws it, as notebooks do.

    Attributes:
        buckets: One entry for each bucket, in the order of reduction.
        backward_ms: Milliseconds spent on gradients, without the waiting.
        waited_ms: Milliseconds for which backward waited for reductions, mostly at the end of
            backward.
        rebuilt: True if buckets are in the order in which gradients came.
        blocked_ms: The part of ``waited_ms`` before all gradients were computed.
    """

    buckets: tuple[BucketReport, ...]
    backward_ms: float
    waited_ms: float
    rebuilt: bool
    blocked_ms: float = 0.0

    @property
    def hidden(self) -> float:
        """The share of communication, from 0 to 1, in which backward did not wait for it."""
        total, end = 0.0, 0.0
        for bucket in sorted(self.buckets, key=lambda bucket: bucket.started_ms):
            total += max(0.0, bucket.reduced_ms - max(bucket.started_ms, end))
            end = max(end, bucket.reduced_ms)
        return 1.0 if total <= 0 else max(0.0, 1.0 - self.waited_ms / total)

    def __str__(self) -> str:
        title = (
            f"backward {self.backward_ms:.1f} ms and {self.waited_ms:.1f} ms of waiting"
            f"{self._where_it_waited()}: {self.hidden:.0%} of communication hidden"
        )
        titles = ("bucket", "bytes", "dtype", "ready", "started", "reduced", "parameters")
        rows = [
            (
                str(bucket.index),
                f"{bucket.size_bytes:,}",
                bucket.dtype,
                *(f"{ms:.2f} ms" for ms in (bucket.ready_ms, bucket.started_ms, bucket.reduced_ms)),
                _names(bucket.parameters),
            )
            for bucket in self.buckets
        ]
        return str(Page(title, TextTable(titles, rows, range(6))))

    def _where_it_waited(self) -> str:
        """The wait of backward between gradients, as text; "" below 0.05 ms."""
        return f" ({self.blocked_ms:.1f} ms between gradients)" if self.blocked_ms >= 0.05 else ""

    def _repr_svg_(self) -> str:
        return self._svg()

    def _repr_html_(self) -> str:
        return self._svg(inherits=True)

    def timeline(self, path: str | Path) -> None:
        """Write a picture of the pass as SVG: backward, and each bucket from ready to reduced.

        Args:
            path: The file, which is overwritten.
        """
        Path(path).write_text(self._svg())

    def _svg(self, inherits: bool = False) -> str:
        # Backward continues through the waits between gradients, whose places are not recorded.
        computed, ended = (self.backward_ms + more for more in (self.blocked_ms, self.waited_ms))
        told = f"backward, {self.backward_ms:.2f} ms{self._where_it_waited()}"
        backward = [Span(0, computed, "backward", told)]
        if ended > computed:
            told = f"waiting, {ended - computed:.2f} ms"
            backward.append(Span(computed, ended, "waiting", told))
        rows = [("backward", backward)]
        for bucket in self.buckets:
            ready, started = bucket.ready_ms, bucket.started_ms
            spans = [
                Span(ready, started, "ready", "ready, not started"),
                Span(started, bucket.reduced_ms, "reduced", ", ".join(bucket.parameters)),
            ]
            rows.append((f"bucket {bucket.index}, {bucket.size_bytes / 1024:,.0f} KiB", spans))
        headline = f"{ended:.2f} ms; {self.hidden:.0%} of communication hidden"
        return timeline(headline, rows, _KINDS, inherits)


def step_report(
    times: PassTimes, buckets: Sequence[tuple[tuple[str, ...], int, str]], rebuilt: bool
) -> StepReport:
    """The report of a backward pass, in milliseconds from the start of the pass."""
    start = times.started
    reports = tuple(
        BucketReport(
            index,
            *bucket,
            ready_ms=((each.ready or each.started) - start) * 1e3,
            started_ms=(each.started - start) * 1e3,
            reduced_ms=(each.reduced - start) * 1e3,
        )
        for index, (bucket, each) in enumerate(zip(buckets, times.buckets, strict=True))
    )
    computed = times.computed - times.blocked
    backward, waited = computed - start, times.ended - computed
    return StepReport(reports, backward * 1e3, waited * 1e3, rebuilt, times.blocked * 1e3)


def _names(names: Sequence[str], most: int = 3) -> str:
    if len(names) <= most:
        return ", ".join(names)
    return f"{names[0]} … {names[-1]} ({len(names)})"
