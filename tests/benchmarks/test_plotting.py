"""Charts of benchmarks: bars as long as values say, and the option in every program."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.table import Table

from benchmarks import plotting

FOLDER = Path(__file__).parents[2] / "benchmarks"
#: What programs share, beside the programs.
PARTS = {"by_turns", "drawing", "figures", "measuring", "peers", "plotting"}
#: Programs that measure no times.
UNTIMED = {"plans", "resident"}


def table() -> Table:
    made = Table(title="Milliseconds")
    for name in ("operation", "size", "ours", "theirs"):
        made.add_column(name)
    made.add_row("add", "8 B", "1.50 ±3%", "[red]3.00[/]")
    made.add_row("", "1 KiB", "2.00", "-")
    return made


def test_a_table_becomes_bars(tmp_path: Path) -> None:
    chart = plotting.chart(table(), ("ours", "theirs"), labels=2)
    assert chart.title == "Milliseconds"
    assert chart.rows == [
        ("add, 8 B", {"ours": 1.5, "theirs": 3.0}),
        ("add, 1 KiB", {"ours": 2.0}),
    ]
    plotting.draw(tmp_path / "x.svg", chart, plotting.Chart("none", []))
    root = ElementTree.parse(tmp_path / "x.svg").getroot()
    bars = [each for each in root if each.get("height") == "11"]
    widths = [float(each.get("width", "0")) for each in bars]
    assert widths == pytest.approx([260.0, 520.0, 346.667])
    assert "prefers-color-scheme: dark" in (tmp_path / "x.svg").read_text()


def test_numbers_are_written_out_with_what_they_count() -> None:
    made = Table(title="µs")
    for name in ("call", "ranks", "ours"):
        made.add_column(name)
    made.add_row("add", "2", "63,300")
    chart = plotting.chart(made, ("ours",), labels=2)
    assert chart.rows == [("add, 2 ranks", {"ours": 63300.0})]
    assert ">63,300<" in plotting.picture([chart])


def test_far_values_are_drawn_by_their_logarithms() -> None:
    drawn = plotting.picture([plotting.Chart("µs", [("a", {"x": 1.0}), ("b", {"x": 1000.0})])])
    widths = [float(e.get("width", "0")) for e in ElementTree.fromstring(drawn)
              if e.get("height") == "11"]  # fmt: skip
    assert widths == pytest.approx([130.0, 520.0])


def test_every_program_draws() -> None:
    programs = {path.stem for path in FOLDER.glob("*.py")} - PARTS - UNTIMED
    without = [n for n in programs if "draw(" not in (FOLDER / f"{n}.py").read_text()]
    assert not without
