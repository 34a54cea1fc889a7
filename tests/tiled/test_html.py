"""Pictures and tables in notebooks: text stays text, and no script comes with it."""

from __future__ import annotations

from xml.etree import ElementTree

from tilework.tiled.html import lines_html, table_html

HOSTILE = "<script>alert('&')</script>\x1b[2J"


def test_lines_are_text_in_the_colours_of_boxes() -> None:
    root = ElementTree.fromstring(
        lines_html(
            [[(HOSTILE, "bold")], [("██ ", "#8dd3c7"), ("a", "black on #fdb462"), ("b", "")]]
        )
    )
    assert not list(root.iter("script"))
    assert "".join(root.itertext()) == HOSTILE.replace("\x1b", r"\x1b") + "\n██ ab"
    assert [each.get("style") for each in root.iter("span")] == [
        "color:#8dd3c7",
        "color:#000;background:#fdb462",
    ]


def test_tables_are_text() -> None:
    root = ElementTree.fromstring(f"<p>{table_html(HOSTILE, ['n'], [[HOSTILE], ['1']], {0})}</p>")
    assert not list(root.iter("script"))
    assert [each.text for each in root.iter("td")] == [HOSTILE.replace("\x1b", r"\x1b"), "1"]
    assert {each.get("style") for each in root.iter("td")} == {"text-align:right"}


def test_what_is_empty_has_no_table() -> None:
    assert table_html("nothing", ["n"], []) == "<div>nothing</div>"
