"""The page: whole by itself, with a picture of every rank."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

from tests.inspect.jobs import MS, late_step, operation, traced, write_rank
from tilework.inspect import read_timeline, summarize
from tilework.inspect.page import html_page


class Tags(HTMLParser):
    """Checks that tags close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.append(tag)
        if tag not in ("meta", "line", "rect"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "rect"):
            assert self.open.pop() == tag


def test_the_page_is_whole_and_fetches_nothing(tmp_path: Path) -> None:
    timeline = traced(tmp_path, late_step(2), ranks=3).timeline()
    page = html_page(timeline, summarize(timeline))
    tags = Tags()
    tags.feed(page)
    assert tags.seen.count("svg") == 2
    assert not {"script", "link", "img", "iframe"} & set(tags.seen)
    assert set(re.findall(r"https?://[^\"]*", page)) == {"http://www.w3.org/2000/svg"}
    assert "prefers-color-scheme: dark" in page
    assert "waits for rank 2" in page


def test_names_are_escaped(tmp_path: Path) -> None:
    lines = [["t", 9, "<script>"], ["b", 1, 0, 9], ["e", 1, MS], operation(1, 0, 2), ["z", 3 * MS]]
    write_rank(tmp_path, 0, lines)
    timeline = read_timeline(tmp_path)
    assert "<script>" not in html_page(timeline, summarize(timeline))


def test_many_short_operations_are_few_bars(tmp_path: Path) -> None:
    for rank in (0, 1):
        lines = [operation(n, 2 * n, 2 * n + 1) for n in range(1, 20_000)]
        write_rank(tmp_path, rank, [*lines, ["z", 50_000 * MS]])
    timeline = read_timeline(tmp_path)
    assert html_page(timeline, summarize(timeline)).count("<rect") < 6000
