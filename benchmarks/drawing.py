"""How ``collectives.py`` shows its figures: tables, lines of text, charts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from figures import SEGMENT, TILEWORK, Cell, compare, scaled, size_text
from plotting import Chart
from rich.markup import escape
from rich.table import Table

#: A rank's share of these does not grow with the number of ranks.
EVEN_WORK = ("all_reduce", "broadcast", "all_to_all", "barrier")


def microseconds(seconds: float | None) -> str:
    """A time, as in the tables."""
    return "-" if seconds is None else f"{seconds * 1e6:,.{1 if seconds < 1e-3 else 0}f}"


def times_table(cells: Sequence[Cell], ranks: int, what: str = "medians ± spread") -> Table:
    """Microseconds on one number of ranks, and each peer's as a multiple of tilework's."""
    peers = list(dict.fromkeys(name for cell in cells for name in cell.seconds))
    shown = [cell for cell in cells if cell.ranks == ranks]
    dtypes = list(dict.fromkeys(cell.case.dtype for cell in shown if cell.case.dtype != "-"))
    drawn = Table(
        title=f"{ranks} ranks: microseconds a call, {what}; x: times tilework's (! below 1)"
    )
    drawn.add_column("operation", no_wrap=True)
    drawn.add_column("size", justify="right", no_wrap=True)
    for dtype in dtypes or ["-"]:
        for peer in peers:
            drawn.add_column(f"{dtype}\n{peer}", justify="right")
            if peer != TILEWORK:
                drawn.add_column("\nx", justify="right")
    lines: dict[tuple[str, int], list[str]] = {}
    for cell in shown:
        line = lines.setdefault((cell.case.operation, cell.case.bytes), [])
        for peer in peers:
            line += column(cell, peer)
    before = ""
    for (operation, size), texts in lines.items():
        if before not in ("", operation):
            drawn.add_section()
        drawn.add_row("" if operation == before else operation, size_text(size), *texts)
        before = operation
    return drawn


def column(cell: Cell, peer: str) -> list[str]:
    """What one peer has in a line of the table."""
    text = microseconds(cell.seconds[peer])
    if (spread := cell.spreads.get(peer)) is not None:
        text += f" ±{spread:.0%}"
    if peer == TILEWORK:
        return [text]
    ratio = cell.ratio(peer)
    if ratio is None:
        return [text, "-"]
    if ratio < 1:
        return [text, f"[bold red]{ratio:.2f} ![/]"]
    return [text, f"{ratio:,.{1 if ratio < 10 else 0}f}"]


def scaling_table(cells: Sequence[Cell], cores: int) -> Table | None:
    """Times in proportion to the ranks on a core; None for less than three numbers of ranks."""
    counts = sorted({cell.ranks for cell in cells})
    if len(counts) < 3:
        return None
    drawn = Table(title=f"microseconds x {cores} cores / ranks: constant where it is proportional")
    drawn.add_column("operation", no_wrap=True)
    drawn.add_column("of", no_wrap=True)
    for ranks in counts:
        drawn.add_column(f"{ranks} ranks", justify="right")
    drawn.add_column(f"{counts[-1]} : {counts[0]}", justify="right")
    lines: dict[tuple[str, str], list[float]] = {}
    for cell in cells:
        if cell.case.operation in EVEN_WORK:
            for peer, seconds in cell.seconds.items():
                if seconds is not None:
                    line = lines.setdefault((str(cell.case), peer), [])
                    line.append(scaled(seconds, cell.ranks, cores))
    for (case, peer), times in lines.items():
        shown = "" if peer != TILEWORK else case
        growth = f"{times[-1] / times[0]:.2f}"
        drawn.add_row(shown, peer, *(microseconds(time) for time in times), growth)
    return drawn


def segment_table(cells: Sequence[Cell]) -> Table:
    """Tensors of torch's against tensors of ``group.empty``."""
    drawn = Table(title="tilework, float32, buffers in the segment: microseconds a call")
    for name in ("operation", "ranks", "torch.empty", "group.empty", "gain", "share of the limit"):
        drawn.add_column(name, justify="left" if name == "operation" else "right")
    for cell in cells:
        times = [microseconds(cell.seconds[name]) for name in (TILEWORK, SEGMENT)]
        ratio, share = cell.ratio(SEGMENT), cell.share(SEGMENT)
        gain = "-" if ratio is None else f"{1 / ratio:.2f}"
        reached = "" if share is None else f"{share:.0%}"
        drawn.add_row(str(cell.case), str(cell.ranks), *times, gain, reached)
    return drawn


def limit_lines(cells: Sequence[Cell]) -> Iterator[str]:
    """How close the largest operations come to what memory allows."""
    for cell in cells:
        if cell.limit is not None:
            shares = ((name, cell.share(name)) for name in cell.seconds)
            told = ", ".join(f"{name} {share:.0%}" for name, share in shares if share is not None)
            yield (
                f"{cell}: memory allows {microseconds(cell.limit)} us; share of that rate "
                f"reached: {told}"
            )


def comparison_lines(cells: Sequence[Cell], peer: str) -> Iterator[str]:
    """The peer's geometric means, and the cells in which it is faster."""
    result = compare(cells, peer)
    if not result["cells"]:
        return
    means = ", ".join(f"{where} {mean:.2f}" for where, mean in result["geometric_means"].items())
    yield f"{peer} takes times as long as tilework (geometric mean): {means}"
    slower = result["tilework_slower"]
    names = "; ".join(f"{name} ({ratio:.2f})" for name, ratio in slower.items())
    count = f"{len(slower)} of {result['cells']} cells"
    yield escape(f"tilework is slower than {peer} in {count}" + f": {names}" * bool(slower))


def charts(cells: Sequence[Cell]) -> Iterator[Chart]:
    """Bars of all times, a chart for each number of ranks."""
    for ranks in sorted({cell.ranks for cell in cells}):
        rows = [
            (str(cell.case), {who: s * 1e6 for who, s in cell.seconds.items() if s is not None})
            for cell in cells
            if cell.ranks == ranks
        ]
        yield Chart(f"{ranks} ranks: microseconds a call", rows)
