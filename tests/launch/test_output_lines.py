"""From bytes to lines; no processes here."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tilework.launch.output_lines import MAX_LINE_BYTES, LineAssembler, prefix_for


def assemble(data: bytes, cuts: list[int], terminal: bool = False) -> bytes:
    assembler = LineAssembler(b"> ", terminal)
    borders = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    pieces = [data[a:b] for a, b in itertools.pairwise(borders)]
    return b"".join([assembler.feed(piece) for piece in pieces] + [assembler.finish()])


@given(st.lists(st.binary(max_size=40)), st.lists(st.integers(min_value=0)))
def test_lines_do_not_depend_on_how_they_arrive(lines: list[bytes], cuts: list[int]) -> None:
    data = b"".join(line.replace(b"\n", b"") + b"\n" for line in lines)
    expected = b"".join(b"> " + line + b"\n" for line in data.split(b"\n")[:-1])
    assert assemble(data, cuts) == expected


def test_last_line_without_newline_is_ended() -> None:
    assert assemble(b"a\nb", []) == b"> a\n> b\n"


def test_long_line_is_broken_at_a_character() -> None:
    text = "é" * MAX_LINE_BYTES
    lines = assemble(b"x" + text.encode(), [])[:-1].split(b"\n")
    assert max(map(len, lines)) <= MAX_LINE_BYTES + 2
    assert "".join(line[2:].decode() for line in lines) == f"x{text}"


def test_memory_for_a_line_is_bounded() -> None:
    assembler = LineAssembler(b"", False)
    out = sum(len(assembler.feed(b"x" * 1000)) for _ in range(1000))
    assert out > 1_000_000 - MAX_LINE_BYTES - 1000


def test_colour_ends_with_the_line_on_a_terminal() -> None:
    assert assemble(b"\x1b[31mred\nplain\n", [], True) == b"> \x1b[31mred\x1b[0m\n> plain\n"


def test_rewritten_line_is_shown_in_its_last_state_on_a_terminal() -> None:
    assert assemble(b"10%\r50%\r99%\ndone\r\n", [], True) == b"> 99%\n> done\r\n"


def test_bytes_stay_as_they_are_elsewhere() -> None:
    assert assemble(b"\xff\x1b[1m10%\r50%\n", []) == b"> \xff\x1b[1m10%\r50%\n"


def test_each_rank_has_its_colour() -> None:
    assert prefix_for(0, True) != prefix_for(1, True).replace(b"1", b"0")
    assert prefix_for(12, False) == b"[12] "
