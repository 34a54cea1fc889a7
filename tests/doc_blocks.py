"""The fenced blocks of the documentation's pages, and what runs those that sessions consist of.

Apart from the tests: processes that run blocks load this module.
"""

from __future__ import annotations

import doctest
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: Path
    line: int
    info: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def ranks(self) -> int:
        """How many ranks it is a program for; 0 if it is none."""
        match = re.fullmatch(r"python ranks=(\d+)", self.info)
        return int(match[1]) if match else 0


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, match.start()) + 2, match[1].strip(), match[2])
        for match in FENCE.finditer(text)
    ]


def read_along(blocks: list[Block]) -> None:
    """Execute a page's blocks one after the other, as a reader would type them."""
    torch.set_num_threads(1)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks:
        if block.text.startswith(">>>"):
            run_session(block, names)
        else:
            # Line numbers in tracebacks are then those of the page.
            exec(compile("\n" * (block.line - 1) + block.text, block.where, "exec"), names)


def run_session(block: Block, names: dict[str, Any]) -> None:
    session = doctest.DocTestParser().get_doctest(
        block.text, names, block.where, block.where, block.line
    )
    complaints: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    runner.run(session, out=complaints.append, clear_globs=False)
    names.update(session.globs)
    assert not complaints, "".join(complaints)
