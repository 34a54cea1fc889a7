"""The documentation is true: its programs run, its links lead somewhere.

The blocks of a page that begin with ```` ```python ```` run in a process of their own, each after
the earlier ones and with their names. ```` ```python ranks=2 ```` is a whole program that runs
under ``tilework run -n 2``. Blocks in other languages only have to say which.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
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
OTHER_LANGUAGES = {"bash", "console", "cpp", "json", "make", "text", "toml"}
TRANSFORMERS = ("transformers.models.llama.modeling_llama", "transformers.trainer")

BLOCKS_OF = {page: blocks_of(page) for page in PAGES}
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
