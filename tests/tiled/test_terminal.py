"""Text for terminals: columns, bytes, colours, and outputs that are not in Unicode."""

from __future__ import annotations

import io
import sys

import pytest

from tests.tables import each
from tilework.tiled.terminal import (
    StyledLine,
    bytes_text,
    coloured_picture,
    in_columns,
    print_styled,
)

ROWS = [["who", "shards", "bytes", "share"], ["0", "[2]", "8 B", "100.0%"]]


@each(
    ("width", "titles"),
    [(40, "who  shards  bytes   share"), (20, "who  shards  bytes"), (12, "who  bytes")],
)
def test_columns_that_are_too_wide_are_left_out(width: int, titles: str) -> None:
    lines = in_columns(ROWS, width)
    assert lines[0] == titles
    assert len({len(line) for line in lines}) == 1


@each(("n", "text"), [(0, "0 B"), (1000, "1000 B"), (1536, "1.5 KiB"), (3 * 2**40, "3 TiB")])
def test_bytes(n: int, text: str) -> None:
    assert bytes_text(n) == text


def test_boxes_have_colours_and_lines_have_none() -> None:
    assert coloured_picture([[("│", None), (" a ", 1)]], ["red", "blue"].__getitem__) == [
        [("│", ""), (" a ", "black on blue")]
    ]


@pytest.mark.parametrize(("encoding", "expected"), [("ascii", "+-> #"), ("utf-8", "┌─→ █")])
def test_outputs_not_in_unicode(
    encoding: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding=encoding))

    def render(width: int) -> list[StyledLine]:
        assert width <= 90
        return [[("┌─→ ", "bold"), ("█", "")]]

    print_styled(render)
    sys.stdout.flush()
    assert output.getvalue().decode(encoding).splitlines() == [expected]
