"""Rank 0 live on a terminal, judged by what a terminal would show."""

from __future__ import annotations

import io
import re

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.live import Live
from rich.progress import Progress

from tilework.launch.output_lines import LiveDisplay


class Terminal:
    """Just enough of one: lines, carriage return, cursor up, erase line; nothing scrolls off."""

    def __init__(self) -> None:
        self.rows: list[str] = [""]
        self.row = self.column = 0

    def write(self, data: bytes) -> None:
        for token in re.findall(r"\x1b\[[0-?]*[@-~]|.", data.decode(), re.DOTALL):
            self._token(token)

    def _token(self, token: str) -> None:
        if token == "\n":
            self.row, self.column = self.row + 1, 0
            self.rows += [""] * (self.row + 1 - len(self.rows))
        elif token == "\r":
            self.column = 0
        elif token.endswith("A") and token[0] == "\x1b":
            self.row -= int(token[2:-1] or 1)
        elif token == "\x1b[2K":
            self.rows[self.row] = ""
        elif token[0] != "\x1b":
            line = self.rows[self.row].ljust(self.column)
            self.rows[self.row] = line[: self.column] + token + line[self.column + 1 :]
            self.column += 1

    @property
    def shown(self) -> list[str]:
        return [row.rstrip() for row in self.rows if row.strip()]


def show(*pieces: bytes | str, prefix: bytes = b"") -> list[str]:
    """What is seen after rank 0 wrote bytes and other ranks wrote text, in this order."""
    screen, terminal = LiveDisplay(prefix), Terminal()
    for piece in pieces:
        terminal.write(
            screen.feed(piece) if isinstance(piece, bytes) else screen.above(f"{piece}\n".encode())
        )
    return terminal.shown


def test_plain_lines() -> None:
    assert show(b"a\nb\n", "other", b"c\n", prefix=b"[0] ") == ["[0] a", "[0] b", "other", "[0] c"]


def test_line_in_progress_moves_below_what_others_say() -> None:
    assert show(b"working", "other", b"...done\n") == ["other", "working...done"]


def test_rewritten_line_keeps_its_prefix() -> None:
    bar: list[bytes | str] = [b"\r10%", "first", b"\r50%", "second", b"\r100%\n"]
    assert show(*bar, prefix=b"[0] ") == ["first", "second", "[0] 100%"]


class Captured:
    """What rich writes for a terminal, in the pieces it writes it in."""

    def __init__(self) -> None:
        self.file = io.StringIO()
        self.console = Console(file=self.file, force_terminal=True, width=60, legacy_windows=False)
        self._read = 0

    def news(self) -> bytes:
        text = self.file.getvalue()[self._read :]
        self._read += len(text)
        return text.encode()


def test_lines_of_others_appear_above_a_live_display_of_several_rows() -> None:
    rich = Captured()
    pieces: list[bytes | str] = []
    with Live("one\ntwo\nthree", console=rich.console, auto_refresh=False) as live:
        live.refresh()
        pieces += [rich.news(), "first"]
        live.update("ONE\nTWO\nTHREE", refresh=True)
        pieces += [rich.news(), "second", "third"]
        live.update("1\n2\n3\n4", refresh=True)
        pieces += [rich.news(), "fourth"]
    pieces.append(rich.news())
    assert show(*pieces) == ["first", "second", "third", "fourth", "1", "2", "3", "4"]


def test_progress_bars_with_prefix() -> None:
    rich = Captured()
    pieces: list[bytes | str] = []
    with Progress(console=rich.console, auto_refresh=False) as progress:
        for name in ("train", "test"):
            task = progress.add_task(name, total=2)
            for _ in range(2):
                progress.update(task, advance=1, refresh=True)
                pieces += [rich.news(), f"warning {len(pieces)}"]
        progress.console.print("rank 0 prints")
    pieces.append(rich.news())
    rows = show(*pieces, prefix=b"[0] ")
    assert [row for row in rows if row.startswith("warning")] == [
        f"warning {number}" for number in (0, 2, 4, 6)
    ]
    assert rows[-3] == "[0] rank 0 prints"
    assert [row.split()[1] for row in rows[-2:]] == ["train", "test"]


def test_a_full_screen_program_is_left_alone() -> None:
    screen = LiveDisplay(b"[0] ")
    drawn = b"\x1b[?1049h\x1b[2;5Htext\nmore"
    assert screen.feed(drawn) == drawn
    assert screen.settle().startswith(b"\x1b[?1049l")


def test_settling_shows_the_cursor_and_ends_the_line() -> None:
    screen = LiveDisplay(b"")
    screen.feed(b"\x1b[?25l50%")
    assert screen.settle() == b"\x1b[?25h\x1b[0m\n"
    assert screen.settle() == b""


@given(
    st.lists(
        st.sampled_from([b"a", b"\n", b"\r", b"\x1b[1A", b"\x1b[2K", b"\x1b[31m", b"\xc3\xa9"])
    )
)
def test_pieces_do_not_matter(tokens: list[bytes]) -> None:
    data = b"".join(tokens)
    whole, bytewise = LiveDisplay(b"> "), LiveDisplay(b"> ")
    together = b"".join(bytewise.feed(data[i : i + 1]) for i in range(len(data)))
    assert whole.feed(data) == together


@given(st.binary(max_size=200))
def test_any_bytes_pass(data: bytes) -> None:
    screen = LiveDisplay(b"")
    out = screen.feed(data) + screen.feed(b"\x1b" * 5000) + screen.above(b"line\n")
    assert b"line\n" in out
