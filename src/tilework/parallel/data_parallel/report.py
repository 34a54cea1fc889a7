"""The report of a step: buckets, when each was ready and reduced, and what was overlapped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from io import StringIO
from pathlib import Path


@dataclass
class BucketTimes:
    """Times of one bucket in one backward pass, in seconds of ``time.perf_counter``.

    Attributes:
        ready: Its last gradient was computed.
        started: Its reduction was started.
        reduced: Its reduction was seen to be done; not before the end of backward.
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
        index: Its place in the order of reduction.
        parameters: The names of its parameters, in the order of its memory.
        size_bytes: The bytes that are reduced.
        dtype: What it is reduced in.
        ready_ms: Milliseconds from the start of the pass until its last gradient was computed.
        started_ms: ... until its reduction was started.
        reduced_ms: ... until its reduction was known to be done.
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

    ``print`` shows it as a table; :meth:`timeline` draws it.

    Attributes:
        buckets: One entry for each bucket, in the order of reduction.
        backward_ms: Milliseconds until all gradients were computed.
        waited_ms: Milliseconds for which backward waited for reductions, mostly at its end.
        rebuilt: True if buckets are in the order in which gradients came.
    """

    buckets: tuple[BucketReport, ...]
    backward_ms: float
    waited_ms: float
    rebuilt: bool

    @property
    def hidden(self) -> float:
        """The share of communication that ran beside backward, from 0 to 1.

        That is, of the time in which some bucket was being reduced. 1 if backward never waited for
        a reduction; 0 if nothing was overlapped, as where no processor is idle.
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
            title=f"backward {self.backward_ms:.1f} ms, then {self.waited_ms:.1f} ms of waiting: "
            f"{self.hidden:.0%} of communication hidden"
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

    def timeline(self, path: str | Path) -> None:
        """Write a picture of the pass as SVG: backward, and each bucket from ready to reduced.

        Args:
            path: The file, which is overwritten.
        """
        Path(path).write_text(_svg(self))


def step_report(
    times: PassTimes, buckets: Sequence[tuple[tuple[str, ...], int, str]], rebuilt: bool
) -> StepReport:
    """The report of a pass.

    Args:
        times: Its times.
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
        for index, (bucket, each) in enumerate(zip(buckets, times.buckets, strict=False))
    )
    computed = times.computed - times.blocked
    return StepReport(reports, (computed - start) * 1e3, (times.ended - computed) * 1e3, rebuilt)


def _names(names: Sequence[str], most: int = 3) -> str:
    if len(names) <= most:
        return ", ".join(names)
    return f"{names[0]} … {names[-1]} ({len(names)})"


_LEFT, _WIDTH, _ROW = 150, 640, 22
_STYLE = "text{font:11px system-ui,sans-serif;fill:#374151}"


def _svg(report: StepReport) -> str:
    total = max(report.backward_ms + report.waited_ms, 1e-6)

    def x(ms: float) -> float:
        return _LEFT + ms / total * _WIDTH

    def bar(row: int, start: float, end: float, colour: str, title: str) -> str:
        return (
            f'<rect x="{x(start):.1f}" y="{24 + row * _ROW}" height="{_ROW - 6}" rx="2" '
            f'width="{max(1.0, x(end) - x(start)):.1f}" fill="{colour}">'
            f"<title>{escape(title)}</title></rect>"
        )

    def label(row: int, text: str) -> str:
        return f'<text x="8" y="{36 + row * _ROW}">{escape(text)}</text>'

    rows = [
        label(0, "backward"),
        bar(0, 0, report.backward_ms, "#93c5fd", f"backward, {report.backward_ms:.2f} ms"),
    ]
    for row, bucket in enumerate(report.buckets, 1):
        rows += [
            label(row, f"bucket {bucket.index}, {bucket.size_bytes / 1024:,.0f} KiB"),
            bar(row, bucket.ready_ms, bucket.started_ms, "#e5e7eb", "ready, not started"),
            bar(row, bucket.started_ms, bucket.reduced_ms, "#34d399", ", ".join(bucket.parameters)),
        ]
    height = 40 + (len(report.buckets) + 1) * _ROW
    width = _LEFT + _WIDTH + 20
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}">',
            f"<style>{_STYLE}</style>",
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
            f'<text x="8" y="14">{total:.2f} ms; {report.hidden:.0%} of communication hidden'
            "</text>",
            *rows,
            "</svg>",
            "",
        ]
    )
