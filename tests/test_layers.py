"""The tree is the architecture: imports point down, and stand at the top of their file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import tilework

ROOT = Path(tilework.__file__ or "").parent

#: From the bottom up; a layer may import itself and those before it.
LAYERS = (
    "_core",
    "errors",
    "layout",
    "store",
    "rendezvous",
    "comm",
    "distributed",
    "mesh",
    "tiled",
    "rpc",
    "sharded",
    "dtensor",
    "interop",
    "parallel",
    "torch_backend",
    "testing",
    "launch",
    "cli",
    "__main__",
)
#: What a module re-exports from above it, imported when it is first asked for.
LAZY_UPWARD = {
    ("tilework.dtensor", "tilework.interop"): "to_dtensor and to_sharded are public names of both",
}
#: Nobody but these may use what is meant for tests.
MAY_IMPORT_TESTING = ("testing", "launch", "cli")

#: What a function may import, and why it is not at the top of the file.
LATE_IMPORTS = {
    "rich": "slow, and only some commands draw",
    "asyncio": "slow, and only servers need it",
    "ssl": "slow, and rarely needed",
    "multiprocessing": "slow, and only needed where ranks are not forked",
    "hypothesis": "optional: for tests",
    "pytest": "optional: for tests",
    "torch.distributed": "slow, and only torch's own engines need it",
    "tilework._core": "optional: not built on every platform",
    "tilework.store.torch_bridge": "needs torch.distributed",
    "tilework.interop": "re-exported by a package below it",
    **dict.fromkeys(
        (
            f"tilework.dtensor.{name}"
            for name in ("api", "dispatch.op_names", "serialization", "debug.formatting", "tensor")
        ),
        "DTensor's methods are one line each, and what they do is written with DTensors",
    ),
}


@dataclass(frozen=True)
class Import:
    """One imported module, and where."""

    importer: str
    module: str
    where: str
    late: bool


def module_name(path: Path) -> str:
    parts = ("tilework", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[Import]:
    importer = module_name(path)

    def visit(node: ast.AST, late: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            for module in modules_in(child, path):
                where = f"{path.relative_to(ROOT.parent)}:{getattr(child, 'lineno', 0)}"
                yield Import(importer, module, where, late)
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from visit(child, late or function)

    yield from visit(ast.parse(path.read_text()), late=False)


def modules_in(node: ast.AST, path: Path) -> list[str]:
    """The modules that a statement imports, by full name."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    name = module_name(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    above = package.split(".")[: -node.level + 1 or None] if node.level else []
    base = ".".join([*above, *([node.module] if node.module else [])])
    # "from tilework import comm" names a module, "from tilework.comm import send" does not.
    return [f"{base}.{a.name}" if is_module(f"{base}.{a.name}") else base for a in node.names]


def is_module(name: str) -> bool:
    if name == "tilework._core":  # compiled
        return True
    path = ROOT.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def layer_of(module: str) -> str | None:
    """The layer a module belongs to; None for the bare package and what is not tilework's."""
    parts = module.split(".")
    return parts[1] if parts[0] == "tilework" and len(parts) > 1 else None


FILES = sorted(ROOT.rglob("*.py"))
ALL_IMPORTS = [found for path in FILES for found in imports_of(path)]


def test_every_module_belongs_to_a_layer() -> None:
    found = {layer_of(module_name(path)) for path in FILES} - {None}
    assert found <= set(LAYERS)


def test_imports_point_down() -> None:
    wrong = []
    for found in ALL_IMPORTS:
        importer, imported = layer_of(found.importer), layer_of(found.module)
        if None in (importer, imported):
            continue
        if (found.importer, found.module) in LAZY_UPWARD:
            continue
        if LAYERS.index(imported or "") > LAYERS.index(importer or ""):
            wrong.append(f"{found.where}: {found.importer} imports {found.module}")
    assert not wrong


def test_nobody_needs_the_package_itself() -> None:
    """``import tilework`` would run before, and without, any order of layers."""
    inside = [found for found in ALL_IMPORTS if found.importer != "tilework"]
    wrong = [f.where for f in inside if f.module == "tilework" and layer_of(f.importer) != "cli"]
    assert not wrong


def test_only_launchers_import_testing() -> None:
    users = [found for found in ALL_IMPORTS if layer_of(found.module) == "testing"]
    assert not [f.where for f in users if layer_of(f.importer) not in MAY_IMPORT_TESTING]


def test_imports_inside_functions_are_the_listed_ones() -> None:
    def allowed(module: str) -> bool:
        return any(module == name or module.startswith(f"{name}.") for name in LATE_IMPORTS)

    late = [found for found in ALL_IMPORTS if found.late and not allowed(found.module)]
    assert not [f"{found.where}: {found.module}" for found in late]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import tilework.comm.world", ["tilework.comm.world"]),
        ("from tilework.errors import DistError", ["tilework.errors"]),
        ("from tilework import errors", ["tilework.errors"]),
        ("from tilework import __version__", ["tilework"]),
        ("from . import contract", ["tilework.store.contract"]),
        ("from .contract import Store", ["tilework.store.contract"]),
        ("from .. import errors", ["tilework.errors"]),
    ],
)
def test_how_imports_are_read(text: str, expected: list[str]) -> None:
    statement = ast.parse(text).body[0]
    assert modules_in(statement, ROOT / "store" / "file.py") == expected
