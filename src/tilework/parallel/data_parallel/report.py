"""The report of a step: buckets, when each was ready and reduced, and what was overlapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path

from tilework.tiled import svg


@dataclass
class BucketTimes:
    """Times of one bucket in one backward pass, in seconds of ``time.perf_counter``.

    Attributes:
        ready: The bucket's last gradient was computed.
        started: The reduction was started.
        reduced: The reduction was seen to be done, at the end of backward or later.
    """

    ready: float = 0.0
    started: float = 0.0
    reduced: float = 0.0


@dataclass
class PassTimes:
    """Times of one backward pass.

    Attributes:
        started: The first gradient, or the backward of an output, was reached.
        computed: All gradients were computed, and all reductions started.
        ended: All reductions were done.
        blocked: Seconds before ``computed`` in which backward waited for a reduction.
        buckets: The times of each bucket.
    """

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
        """The share of communication that ran beside backward, from 0 to 1.

        Of the time in which at least one bucket was being reduced, it is the share in which
        backward did not wait. 1 if backward never waited for a reduction; 0 if nothing was
        overlapped, as where no processor is idle.
        """
        total, end = 0.0, 0.0
        for bucket in sorted(self.buckets, key=lambda bucket: bucket.started_ms):
            total += max(0.0, bucket.reduced_ms - max(bucket.started_ms, end))
            end = max(end, bucket.reduced_ms)
        return 1.0 if total <= 0 else max(0.0, 1.0 - self.waited_ms / total)

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table(
            title=f"backward {self.backward_ms:.1f} ms and {self.waited_ms:.1f} ms of waiting"
            f"{self._where_it_waited()}: {self.hidden:.0%} of communication hidden"
        )
        for name in ("bucket", "bytes", "dtype", "ready", "started", "reduced"):
            table.add_column(name, justify="right")
        table.add_column("parameters")
        for bucket in self.buckets:
            table.add_row(
                str(bucket.index),
                f"{bucket.size_bytes:,}",
                bucket.dtype,
                *(f"{ms:.2f} ms" for ms in (bucket.ready_ms, bucket.started_ms, bucket.reduced_ms)),
                _names(bucket.parameters),
            )
        text = StringIO()
        Console(file=text, width=120, force_terminal=False).print(table)
        return text.getvalue()

    def _where_it_waited(self) -> str:
        """The time that backward waited between gradients, as text in parentheses.

        Empty below 0.05 ms.
        """
        return f" ({self.blocked_ms:.1f} ms between gradients)" if self.blocked_ms >= 0.05 else ""

    def _repr_svg_(self) -> str:
        return _svg(self)

    def _repr_html_(self) -> str:
        return _svg(self, inherits=True)

    def timeline(self, path: str | Path) -> None:
        """Write a picture of the pass as SVG: backward, and each bucket from ready to reduced.

        Args:
            path: The file, which is overwritten.
        """
        Path(path).write_text(_svg(self))


def step_report(
    times: PassTimes, buckets: Sequence[tuple[tuple[str, ...], int, str]], rebuilt: bool
) -> StepReport:
    """The report of a backward pass: times become milliseconds from the start of the pass.

    Args:
        times: The times of the pass.
        buckets: The names of the parameters, the bytes and the dtype of each bucket.
        rebuilt: True if buckets are in the order in which gradients came.
    """
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


_LEFT, _WIDTH, _ROW, _TOP = 150, 640, 22, 64
_COLOURS = {
    "backward": "#60a5fa",
    "waiting": "#f59e0b",
    "ready": "#9ca3af80",
    "reduced": "#34d399",
}
_NAMES = {
    "backward": "backward",
    "waiting": "waits for reductions",
    "ready": "ready, not started",
    "reduced": "started to known as reduced",
}


def _svg(report: StepReport, inherits: bool = False) -> str:
    total = max(
        report.backward_ms + report.waited_ms,
        max((bucket.reduced_ms for bucket in report.buckets), default=0.0),
        1e-6,
    )
    scale = _WIDTH / total

    def spans(row: int, start: float, end: float, kind: str, told: str) -> str:
        width = max(1.0, (end - start) * scale)
        return svg.bar(kind, _LEFT + start * scale, _TOP + row * _ROW, width, _ROW - 6, told)

    def label(row: int, text: str) -> str:
        return svg.words(8, _TOP + 12 + row * _ROW, text)

    # Backward goes on through the waits between gradients, whose places are not recorded.
    computed = report.backward_ms + report.blocked_ms
    ended = report.backward_ms + report.waited_ms
    span = f"backward, {report.backward_ms:.2f} ms{report._where_it_waited()}"
    rows = [label(0, "backward"), spans(0, 0, computed, "backward", span)]
    if ended > computed:
        rows.append(spans(0, computed, ended, "waiting", f"waiting, {ended - computed:.2f} ms"))
    for row, bucket in enumerate(report.buckets, 1):
        names = ", ".join(bucket.parameters)
        rows += [
            label(row, f"bucket {bucket.index}, {bucket.size_bytes / 1024:,.0f} KiB"),
            spans(row, bucket.ready_ms, bucket.started_ms, "ready", "ready, not started"),
            spans(row, bucket.started_ms, bucket.reduced_ms, "reduced", names),
        ]
    height = _TOP + (len(report.buckets) + 1) * _ROW + 6
    ticks = [
        (_LEFT + ms * scale, f"{ms:g}{' ms' if ms == 0 else ''}") for ms in svg.round_numbers(total)
    ]
    headline = f"{ended:.2f} ms; {report.hidden:.0%} of communication hidden"
    parts = [
        svg.words(8, 16, headline),
        *svg.legend(_LEFT + 140, 16, _NAMES),
        *svg.axis(ticks, _TOP - 8, height),
        *rows,
    ]
    return svg.document(_LEFT + _WIDTH + 40, height, _COLOURS, parts, inherits)
