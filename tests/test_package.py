"""The package as users get it: typed, cheap to import, documented."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import tilework
import tilework.distributed
from tests.fresh_torch import run_on_torch

#: The packages that users import from.
PUBLIC = (
    "tilework.capture",
    "tilework.checkpoint",
    "tilework.data",
    "tilework.distributed",
    "tilework.dtensor",
    "tilework.errors",
    "tilework.launch",
    "tilework.layout",
    "tilework.mesh",
    "tilework.parallel",
    "tilework.rendezvous",
    "tilework.rpc",
    "tilework.sharded",
    "tilework.store",
    "tilework.testing",
)
#: What calling a function looks like in a docstring.
EXAMPLE = re.compile(r"Example|>>>|::")
#: Functions that only answer a question show their use by their names.
QUESTION = re.compile(r"(get|is)_")


def public_objects(package: str) -> Iterator[tuple[str, Any]]:
    """(name, object) of each class and function that ``package`` publishes."""
    module = importlib.import_module(package)
    for name in getattr(module, "__all__", [n for n in dir(module) if not n.startswith("_")]):
        value = getattr(module, name)
        made_here = getattr(value, "__module__", "").startswith("tilework")
        if made_here and not isinstance(value, types.ModuleType):
            yield f"{package}.{name}", value


def test_type_checkers_see_the_annotations() -> None:
    assert files("tilework").joinpath("py.typed").is_file()


def test_the_version_is_the_one_that_is_packaged() -> None:
    settings = Path(__file__).parents[1].joinpath("pyproject.toml").read_text()
    assert f'\nversion = "{tilework.__version__}"\n' in settings


def test_the_facade_publishes_no_name_twice() -> None:
    names = tilework.distributed.__all__
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("package", PUBLIC)
def test_public_names_are_documented(package: str) -> None:
    for name, value in public_objects(package):
        text = inspect.getdoc(value)
        assert text, f"{name} has no docstring"
        if inspect.isfunction(value) and not QUESTION.match(value.__name__):
            assert EXAMPLE.search(text), f"{name}'s docstring shows no call"


def test_importing_leaves_slow_modules_alone() -> None:
    """The cause of a slow import, which unlike its seconds is the same on each machine."""
    program = (
        "import sys; before = set(sys.modules);"
        "import tilework.distributed;"
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    imported = run_on_torch(program).split()
    slow = {"asyncio", "rich", "ssl", "multiprocessing", "hypothesis", "pytest", "numpy", "http"}
    assert "tilework" in imported
    assert not slow.intersection(imported)


@pytest.mark.parametrize(
    ("module", "unneeded"),
    [
        ("tilework.dtensor", ("tilework.sharded", "tilework.rpc", "zmq")),
        ("tilework.sharded", ("tilework.dtensor", "tilework.rpc", "zmq")),
    ],
)
def test_importing_loads_no_more_than_needed(module: str, unneeded: tuple[str, ...]) -> None:
    imported = run_on_torch(f"import sys, {module}; print(*sys.modules)").split()
    assert module in imported
    assert not set(unneeded).intersection(imported)


def test_packages_are_attributes() -> None:
    program = (
        "import sys, tilework as tw; assert 'torch' not in sys.modules;"
        "assert 'parallel' in dir(tw); print(tw.errors.__name__, hasattr(tw, 'nothing'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "tilework.errors False", done.stderr
