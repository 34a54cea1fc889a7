"""The faces of the packages: the modules that other packages may import."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

from tests.architecture.imports import FILES, ROOT, all_imports, layer_of, module_name, tree

#: By package: the modules below it ("" for the package itself). Others may import the module of a
#: package that is missing here if the package is one file.
FACES: Final[dict[str, tuple[str, ...]]] = {
    "layout": ("", "internal"),
    "show": ("",),
    "store": ("", "internal", "torch_bridge"),
    "rendezvous": ("", "internal"),
    "comm": (
        "world",
        "contract",
        "groups",
        "provenance_digest",
        "backends.internal",
        "backends.machine",
        "launching",
        "functional.internal",
        "operations.internal",
        "per_call.internal",
    ),
    "mesh": ("", "internal"),
    "distributed": ("",),
    "tiled": ("", "rules"),
    "models": ("",),
    "rpc": ("",),
    "sharded": ("", "internal"),
    "dtensor": ("", "internal"),
    "checkpoint": ("", "command"),
    "parallel": ("", "fully_sharded.module", "fully_sharded.unit"),
    "capture": ("", "program.number"),
    "inspect": ("", "command"),
    "plan": ("",),
    "testing": ("",),
    "launch": ("command",),
}

#: The faces that only list what the package's other modules define.
LISTS: Final = [
    *(
        f"tilework.{p}.{each}"
        for p, inner in FACES.items()
        for each in inner
        if each.endswith(("internal", "launching", "machine"))
    ),
    *(f"tilework.{package}" for package in ("tiled", "models", "show")),
]


def is_face(module: str) -> bool:
    """True if other packages may import the module of this full name."""
    if layer_of(module) is None:
        return True
    package, _, inner = module.removeprefix("tilework.").partition(".")
    return inner in FACES.get(package, ("",))


def unused_names(face: str) -> set[str]:
    """The names that a face imports only to offer them, and that no other package mentions."""
    path = ROOT.parent.joinpath(*face.split("."))
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    imports = [node for node in ast.parse(text).body if isinstance(node, ast.ImportFrom)]
    offered = {alias.asname or alias.name for node in imports for alias in node.names}
    return {name for name in offered if name[0] not in "*_"} - set().union(
        *map(_mentioned, _importers(face))
    )


def _importers(face: str) -> list[Path]:
    names = {each.importer for each in all_imports() if each.module == face}
    others = (path for path in FILES if layer_of(module_name(path)) != layer_of(face))
    return [path for path in others if module_name(path) in names]


def _mentioned(path: Path) -> set[str]:
    """The names that a file imports, and the attributes that the file reads."""
    nodes = list(ast.walk(tree(path)))
    imported = {a.name for n in nodes if isinstance(n, ast.ImportFrom) for a in n.names}
    return imported | {node.attr for node in nodes if isinstance(node, ast.Attribute)}
