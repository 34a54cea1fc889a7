"""Pages on terminals, in pipes, in notebooks: text stays text, and fits."""

from __future__ import annotations

import io
import sys
from xml.etree import ElementTree

import pytest
from rich.console import Console

from tests.tables import each
from tilework.layout import Box
from tilework.show import Page, Picture, TextTable, printable

HOSTILE = "<script>alert('&')</script>\x1b[2J"
ROW = Page(TextTable(("who", "why"), [("w" * 60, "y" * 60)]))


def test_notebooks_get_text_in_colours() -> None:
    picture = Picture((2,), [Box((0,), (2,))], [["a"]], ["#fdb462"])
    table = TextTable((HOSTILE, ""), [(HOSTILE, ("██", "#8dd3c7"))])
    root = ElementTree.fromstring(Page((HOSTILE, "bold"), picture, table).html())
    text = "".join(root.itertext())
    assert not list(root.iter("script"))
    assert text.count(printable(HOSTILE)) == 3
    assert {each.get("style") for each in root.iter("span")} == {
        "color:#8dd3c7",
        "color:#000;background:#fdb462",
    }


@each(("encoding", "expected"), [("ascii", "+-> #"), ("utf-8", "┌─→ █")])
def test_outputs_not_in_unicode(
    encoding: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding=encoding))
    Page(("┌─→ █", "bold")).print()
    sys.stdout.flush()
    assert output.getvalue().decode(encoding).splitlines() == [expected]


@each(("terminal", "lines"), [("", 2), ("1", 3)])
def test_rows_are_folded_on_terminals_only(
    terminal: str,
    lines: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", terminal)
    ROW.print()
    assert len(capsys.readouterr().out.splitlines()) == lines


def test_plain_text_has_neither_colours_nor_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert str(Page((HOSTILE, "bold"), "", "b")).splitlines() == [printable(HOSTILE), "", "b"]


def test_rich_draws_pages() -> None:
    output = io.StringIO()
    Console(file=output, width=40).print(ROW)
    text = output.getvalue()
    assert max(map(len, text.splitlines())) <= 40
    assert (text.count("w"), text.count("y")) == (62, 61)
