"""The documentation is true: its programs run, its links lead somewhere.

The blocks of a page that begin with ```` ```python ```` run in a process of their own, each after
the earlier ones and with their names. ```` ```python ranks=2 ```` is a whole program that runs
under ``tilework run -n 2``. ```` ```python tab="train.py" ```` is a file; ``console`` blocks below
files have what their commands print, and ``diff`` blocks what differs from the file's last text.
Blocks in other languages only have to say which.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.doc_blocks import FENCE, Block, blocks_of, read_along
from tests.tables import each
from tests.warm_python import call_warm, run_warm
from tilework.checkpoint.command import add_commands
from tilework.launch.command import parser_of_commands

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = sorted(
    page
    for page in (*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *ROOT.glob("docs/*/*.md"))
    if not page.relative_to(ROOT).parts[0].startswith(".")
)
LINK = re.compile(r"\[[^\]]+\]\((?!https?:|#)([^)#\s]+)")
VARIABLE = re.compile(r"\bTILEWORK_[A-Z_]*[A-Z]")
#: The name of a tab of the site, after the language.
TAB = re.compile(r" tab=\"[^\"]+\"$")
#: The name of a file, after the language.
FILE = re.compile(r'python tab="(\w+\.py)"')
#: A command in a console, and what it prints.
COMMAND = re.compile(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)
OTHER_LANGUAGES = {"bash", "console", "cpp", "diff", "json", "make", "text", "toml", "yaml"}
TRANSFORMERS = ("transformers.models.llama.modeling_llama", "transformers.trainer")

BLOCKS_OF = {page: blocks_of(page) for page in PAGES}
WITH_FILES = [page for page in PAGES if any(FILE.match(block.info) for block in BLOCKS_OF[page])]
BLOCKS = [block for blocks in BLOCKS_OF.values() for block in blocks]
PROGRAMS = [block for block in BLOCKS if block.ranks]
READ_ALONG = {
    page: blocks
    for page in PAGES
    if (blocks := [block for block in BLOCKS_OF[page] if block.info == "python"])
}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", READ_ALONG, ids=name_of)
def test_blocks_run_in_their_order(page: Path, tmp_path: Path) -> None:
    check(call_warm(read_along, READ_ALONG[page], cwd=tmp_path, loaded=needed_by(page)))


@pytest.mark.parametrize("block", READ_ALONG[README], ids=lambda block: block.where)
def test_blocks_of_the_readme_run_alone(block: Block, tmp_path: Path) -> None:
    check(call_warm(read_along, [block], cwd=tmp_path))


@pytest.mark.parametrize("block", PROGRAMS, ids=[block.where for block in PROGRAMS])
def test_programs_run_under_the_launcher(block: Block, tmp_path: Path) -> None:
    if "from peft " in block.text and importlib.util.find_spec("peft") is None:
        pytest.skip("needs peft (pip install peft)")
    program = tmp_path / "program.py"
    program.write_text(block.text)
    command = ["-m", "tilework", "run", "-n", str(block.ranks), str(program)]
    check(run_warm(*command, cwd=tmp_path, loaded=needed_by(block.page)))


@pytest.mark.parametrize("page", WITH_FILES, ids=name_of)
def test_commands_print_what_is_shown(page: Path, tmp_path: Path) -> None:
    """Commands that name a file of the page, and ``rm``."""
    for block in BLOCKS_OF[page]:
        if file := FILE.match(block.info):
            (tmp_path / file[1]).write_text(block.text)
        for command, printed in COMMAND.findall(block.text) if block.info == "console" else ():
            name, *arguments = shlex.split(command, comments=True)
            if name == "rm":
                shutil.rmtree(tmp_path / arguments[-1])
            elif any((tmp_path / each).is_file() for each in arguments):
                program = arguments if name == "python" else ["-m", name, *arguments]
                done = run_warm(*program, cwd=tmp_path)
                assert done.stdout == printed, f"{block.where}: {command}\n{done.stderr}"


@pytest.mark.parametrize("page", WITH_FILES, ids=name_of)
def test_changes_are_those_between_files(page: Path) -> None:
    shown, before = "", dict[str, str]()
    for block in BLOCKS_OF[page]:
        if file := FILE.match(block.info):
            if shown:
                texts = before[file[1]].splitlines(), block.text.splitlines()
                changes = "\n".join(list(difflib.unified_diff(*texts, n=1))[2:])
                assert shown.rstrip("\n") == re.sub("(?m)^@@ .*\n", "@@", changes), block.where
            before[file[1]], shown = block.text, ""
        elif block.info.startswith("diff"):
            shown = block.text


def needed_by(page: Path) -> tuple[str, ...]:
    """Modules that take seconds to load, of all blocks of the page."""
    return (
        TRANSFORMERS if any("from transformers" in block.text for block in BLOCKS_OF[page]) else ()
    )


def check(done: subprocess.CompletedProcess[str]) -> None:
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
        and not FILE.match(block.info)
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
