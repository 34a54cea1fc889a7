"""Tables: columns that fit, aligned, and bars in the room that is left."""

from __future__ import annotations

from tests.tables import each
from tilework.show import Bar, Page, TextTable

BARS = TextTable(
    ("who", "shards", "bytes", "share", ""),
    [("0", "[2]", "8 B", "66.7%", Bar(1, "red")), ("1", "[1]", "4 B", "33.3%", Bar(0.5, "red"))],
    {2, 3},
    (3, 1),
)


def drawn(width: int) -> list[str]:
    return ["".join(text for text, _ in line).rstrip() for line in BARS.lines(width)]


@each(
    ("width", "titles"),
    [(60, "who  shards  bytes  share"), (20, "who  shards  bytes"), (16, "who  bytes")],
)
def test_columns_without_room_are_left_out(width: int, titles: str) -> None:
    assert drawn(width)[0] == titles
    assert max(map(len, drawn(width))) <= width


@each(("width", "bars"), [(80, (20, 10)), (37, (10, 5)), (29, (0, 0))])
def test_bars_fill_the_room(width: int, bars: tuple[int, int]) -> None:
    assert tuple(line.count("█") for line in drawn(width)[1:]) == bars


def test_a_table_without_rows_is_not_drawn() -> None:
    assert str(Page("nothing", TextTable(("a",), []))) == "nothing"
