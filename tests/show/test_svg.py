"""Timelines as SVG: spans in proportion, and text that stays text."""

from __future__ import annotations

from xml.etree import ElementTree

from tilework.show import Span, timeline

SVG = "{http://www.w3.org/2000/svg}"


def test_spans_are_in_proportion() -> None:
    spans = [Span(0, 1, "work", "<w>"), Span(1, 4, "wait", "")]
    root = ElementTree.fromstring(
        timeline("<b>", [("<row>", spans)], {"work": ("red", "<works>"), "wait": ("blue", "waits")})
    )
    work, wait = (
        [float(bar.get("width", 0)) for bar in root.iter(f"{SVG}rect") if bar.get("class") == kind]
        for kind in ("work", "wait")
    )
    assert wait[1] == 3 * work[1]
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[:2] == ["<b>", "<works>"]
    assert texts[-1] == "<row>"


def test_a_timeline_without_spans() -> None:
    assert "nothing" in timeline("nothing", [], {})
