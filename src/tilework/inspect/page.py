"""A timeline as one HTML page: the sentences, a picture, a table. No script, server or network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from tilework.inspect.judging import Summary, place
from tilework.inspect.reading import RankTrace
from tilework.inspect.timeline import Timeline, TracedWait
from tilework.show import Span as Bar
from tilework.show import timeline as picture

_KINDS = {
    "waiting": ("#f59e0b", "waits for a rank"),
    "moving": ("#3b82f6", "moves data"),
    "named": ("#a7c7b7", "span of the program"),
}
_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #1f2937; background: #fff }
@media (prefers-color-scheme: dark) { body { color: #d1d5db; background: #111827 } }
svg { max-width: 100%; height: auto } figure { margin: 1.5rem 0 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: .2rem .8rem; text-align: right; border-bottom: 1px solid #9ca3af55 }
td:first-child, th:first-child { text-align: left }
"""
#: A picture has this many places across: shorter bars of a kind are drawn together.
_PLACES = 1280
#: The length of the second picture, as a part of the trace, and in operations.
_CLOSE_OPERATIONS = 12
_MOST_ROWS = 64


def html_page(timeline: Timeline, summary: Summary) -> str:
    """The page of a timeline."""
    close = _close_up(timeline)
    pictures = [("The whole trace", 0, timeline.length)]
    if close is not None:
        pictures.append(("Around the longest wait", *close))
    body = [
        "<h1>What the ranks did</h1>",
        *(f"<p>{escape(line)}</p>" for line in summary.lines()),
        *(f"<figure>{_picture(timeline, *each)}</figure>" for each in pictures),
        _table(summary),
    ]
    return "\n".join([
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width">',
        f"<title>tilework trace</title><style>{_STYLE}</style></head><body>",
        *body,
        "</body></html>",
        "",
    ])  # fmt: skip


def _picture(timeline: Timeline, headline: str, start: int, end: int) -> str:
    rows: list[tuple[str, Sequence[Bar]]] = []
    waits = {id(wait.waiting): wait for wait in timeline.waits}
    for trace in timeline.ranks[:_MOST_ROWS]:
        bars = _bars(trace, waits, start, end)
        rows.append((f"rank {trace.rank}", [b for b in bars if b.kind != "named"]))
        named = [bar for bar in bars if bar.kind == "named"]
        rows += [("   program", named)] if named else []
    left_out = len(timeline.ranks) - _MOST_ROWS
    note = f"<figcaption>{left_out} more ranks are not drawn</figcaption>" if left_out > 0 else ""
    return picture(headline, rows, _KINDS) + note


def _bars(trace: RankTrace, waits: Mapping[int, TracedWait], start: int, end: int) -> list[Bar]:
    found: list[tuple[int, int, str, str]] = []
    for op in trace.operations:
        begun, over = op.blocked
        wait = waits.get(id(op))
        told = f"{op.what} at {place(op.site)}"
        if wait is not None:
            words = f"waits for rank {wait.awaited.rank}: {told}"
            found.append((wait.start, wait.end, "waiting", words))
            begun = wait.end
        if over > begun:
            found.append((begun, over, "moving", told))
    for span in trace.spans:
        if span.thread == trace.own_thread:
            found.append((span.start, span.end, "named", span.name))
    inside = [each for each in found if each[1] > start and each[0] < end]
    return list(_merged(inside, start, end))


def _merged(found: list[tuple[int, int, str, str]], start: int, end: int) -> Iterator[Bar]:
    """Bars, those that are too short and close to be told apart together."""
    least = (end - start) / _PLACES / 1e6
    last: dict[str, Bar] = {}
    for begun, over, kind, told in sorted(found):
        bar = Bar((max(begun, start) - start) / 1e6, (min(over, end) - start) / 1e6, kind, told)
        before = last.get(kind)
        if before and bar.start - before.end < least and bar.end - bar.start < least:
            last[kind] = before._replace(end=max(before.end, bar.end))
            continue
        if before:
            yield _timed(before)
        last[kind] = bar
    yield from map(_timed, last.values())


def _timed(bar: Bar) -> Bar:
    return bar._replace(told=f"{bar.told} ({bar.end - bar.start:.3f} ms)")


def _close_up(timeline: Timeline) -> tuple[int, int] | None:
    """The times around the longest wait; None if the whole trace is as short."""
    longest = max(timeline.waits, key=lambda wait: wait.end - wait.start, default=None)
    if longest is None or len(timeline.meetings) <= _CLOSE_OPERATIONS:
        return None
    middle = next(
        at
        for at, meeting in enumerate(timeline.meetings)
        if longest.waiting in meeting.parts.values()
    )
    near = timeline.meetings[max(0, middle - _CLOSE_OPERATIONS // 2) :][:_CLOSE_OPERATIONS]
    parts = [part for meeting in near for part in meeting.parts.values()]
    return min(part.entered for part in parts), max(part.end for part in parts)


def _table(summary: Summary) -> str:
    header = "<tr><th></th><th>waits for others</th><th>all others wait for it</th></tr>"
    rows = (
        f"<tr><td>rank {rank}</td><td>{1000 * waits:,.1f} ms</td>"
        f"<td>{1000 * summary.waited_for[rank]:,.1f} ms</td></tr>"
        for rank, waits in summary.waiting.items()
    )
    return f"<table>{header}{''.join(rows)}</table>"
