"""The documentation is true: its programs run, its links lead somewhere.

A block that begins with ```` ```python ```` runs in a process of its own, after the earlier ones
of its file and with their names. ```` ```python ranks=2 ```` is a whole program that runs under
``tilework run -n 2``. Blocks in other languages only have to say which.
"""

from __future__ import annotations

import argparse
import doctest
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import Job, Rank
from tests.tables import each
from tests.warm_python import run_warm
from tilework.checkpoint.command import add_commands
from tilework.launch.command import parser_of_commands

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page
    for page in (*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *ROOT.glob("docs/*/*.md"))
    if not page.relative_to(ROOT).parts[0].startswith(".")
)
FENCE = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", re.MULTILINE)
LINK = re.compile(r"\[[^\]]+\]\((?!https?:|#)([^)#\s]+)")
VARIABLE = re.compile(r"\bTILEWORK_[A-Z_]*[A-Z]")
#: The name of a tab of the site, after the language.
TAB = re.compile(r" tab=\"[^\"]+\"$")
OTHER_LANGUAGES = {"bash", "console", "cpp", "json", "make", "text", "toml"}


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


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PROGRAMS = [block for block in BLOCKS if block.ranks]
READ_ALONG = {
    page: blocks
    for page in PAGES
    if (blocks := [b for b in BLOCKS if b.page == page and b.info == "python"])
}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def read_along(reader: Rank, blocks: list[Block]) -> None:
    """Execute a page's blocks one after the other, as a reader would type them."""
    os.chdir(reader.folder)
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


@pytest.mark.parametrize("page", READ_ALONG, ids=name_of)
def test_blocks_run_in_their_order(page: Path, tmp_path: Path) -> None:
    with Job(tmp_path, 1, read_along, (READ_ALONG[page],)) as job:
        job.hear(0, seconds=180)


@pytest.mark.parametrize("block", READ_ALONG[ROOT / "README.md"], ids=lambda block: block.where)
def test_blocks_of_the_readme_run_alone(block: Block, tmp_path: Path) -> None:
    with Job(tmp_path, 1, read_along, ([block],)) as job:
        job.hear(0, seconds=180)


@pytest.mark.parametrize("block", PROGRAMS, ids=[block.where for block in PROGRAMS])
def test_programs_run_under_the_launcher(block: Block, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(block.text)
    command = ["-m", "tilework", "run", "-n", str(block.ranks), str(program)]
    done = run_warm(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_commands_have_the_options_that_are_shown() -> None:
    of_checkpoints = argparse.ArgumentParser("tilework checkpoint")
    add_commands(of_checkpoints)
    shown = (line for block in BLOCKS for line in block.text.splitlines() if "$ tilework " in line)
    for line in shown:
        command = re.split(r" [|>] ", line.partition("$ tilework ")[2])[0]
        name, *arguments = shlex.split(command, comments=True)
        if name == "checkpoint":
            of_checkpoints.parse_args(arguments)
        else:
            parser_of_commands("").parse_args([name, *arguments])


def test_every_variable_of_the_environment_is_listed() -> None:
    """Those that the sources name, but for the compiler's and a mode's parts."""
    sources = (ROOT / "src/tilework").rglob("*.py")
    named = {name for path in sources for name in VARIABLE.findall(path.read_text())}
    listed = set(VARIABLE.findall((ROOT / "docs/environment.md").read_text()))
    assert named == listed


def test_every_block_says_what_it_is() -> None:
    unclear = [
        f"{block.where}: {block.info!r}"
        for block in BLOCKS
        if block.info != "python"
        and not block.ranks
        and TAB.sub("", block.info) not in OTHER_LANGUAGES
    ]
    assert not unclear


@each("page", PAGES)
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    assert not [link for link in LINK.findall(text) if not (page.parent / link).exists()]


IMPORT = re.compile(r"^from (tilework[\w.]*) import (\([^)]*\)|.*)$", re.MULTILINE)


def test_each_name_is_imported_from_the_same_place_throughout() -> None:
    places: dict[str, set[str]] = {}
    for text in (block.text for block in BLOCKS if block.info.startswith("python")):
        for package, names in IMPORT.findall(text):
            for name in re.findall(r"\w+(?=,|\s|\)|$)", re.sub(r" as \w+", "", names)):
                places.setdefault(name, set()).add(package)
    assert not {name: found for name, found in places.items() if len(found) > 1}
