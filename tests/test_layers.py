"""The tree is the architecture: imports point down, and stand at the top of their file."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.drawing import DRAWINGS, DRAWN, parts_of
from tests.architecture.faces import LISTS, is_face, unused_names
from tests.architecture.imports import (
    FILES,
    LAYERS,
    ROOT,
    all_imports,
    contracted,
    import_cycles,
    imported_modules,
    layer_of,
    module_graph,
    module_name,
    transitive_reduction,
)
from tests.architecture.private_names import foreign_private_names

#: Nobody but these may use what is meant for tests.
MAY_IMPORT_TESTING = ("testing", "launch", "cli")

#: What a function may import, and why it is not at the top of the file.
LATE_IMPORTS = {
    "tilework.launch.command": "slow, and `tilework checkpoint` does without",
    "tilework.inspect": "loads torch, and only traced ranks need it",
    "tilework.checkpoint.command": "slow, and only `tilework checkpoint` needs it",
    "rich": "slow, and only some commands draw",
    "asyncio": "slow, and only servers need it",
    "cloudpickle": "only prompts and notebooks need it",
    "ssl": "slow, and rarely needed",
    "multiprocessing": "slow, and only needed where ranks are not forked",
    "fsspec": "optional: only paths that are URLs need it",
    "hypothesis": "optional: for tests",
    "pytest": "optional: for tests",
    "torch._dynamo": "slow, and only compiled programs need it",
    "torch._inductor": "slow, and only compiled programs need it",
    "torch._subclasses": "slow, and only compiled programs need it",
    "torch.fx.experimental": "slow, and only compiled programs need it",
    "torch.distributed": "slow, and only torch's own engines need it",
    "tilework._core": "optional: not built on every platform",
    "tilework.store.torch_bridge": "needs torch.distributed",
    "tilework.sharded.remote": "loads RPC and ZeroMQ, and only remote shards need them",
    "tilework.comm.backends": "each is imported with its first group; torch's engines are slow",
}


def test_every_module_belongs_to_a_layer() -> None:
    assert {layer_of(module_name(path)) for path in FILES} - {None} <= set(LAYERS)


def test_imports_point_down() -> None:
    wrong = []
    for each in all_imports():
        importer, imported = layer_of(each.importer), layer_of(each.module)
        if None in (importer, imported):
            continue
        if LAYERS.index(imported or "") > LAYERS.index(importer or ""):
            wrong.append(f"{each.where}: {each.importer} imports {each.module}")
    assert not wrong


def test_nobody_needs_the_package_itself() -> None:
    """``import tilework`` would run before, and without, any order of layers."""
    inside = [each for each in all_imports() if each.importer != "tilework"]
    wrong = [f.where for f in inside if f.module == "tilework" and layer_of(f.importer) != "cli"]
    assert not wrong


def test_packages_enter_each_other_through_faces() -> None:
    wrong = [
        f"{each.where}: {each.importer} imports {each.module}"
        for each in all_imports()
        if layer_of(each.importer) not in (None, layer_of(each.module)) and not is_face(each.module)
    ]
    assert not wrong


@pytest.mark.parametrize("face", LISTS)
def test_other_packages_use_all_that_a_face_offers(face: str) -> None:
    assert not unused_names(face)


def test_no_package_reads_private_attributes_of_another() -> None:
    assert not foreign_private_names()


def test_only_launchers_import_testing() -> None:
    users = [each for each in all_imports() if layer_of(each.module) == "testing"]
    assert not [f.where for f in users if layer_of(f.importer) not in MAY_IMPORT_TESTING]


def test_imports_inside_functions_are_the_listed_ones() -> None:
    def allowed(module: str) -> bool:
        return any(module == name or module.startswith(f"{name}.") for name in LATE_IMPORTS)

    late = [each for each in all_imports() if each.late and not allowed(each.module)]
    assert not [f"{each.where}: {each.module}" for each in late]


def test_no_module_imports_one_that_imports_it_back() -> None:
    """Imports in functions and under ``TYPE_CHECKING`` count, too."""
    assert not import_cycles(module_graph())


@pytest.mark.parametrize(
    "package", ["dtensor", "sharded", "checkpoint", "parallel", "tiled", "layout"]
)
def test_no_folder_imports_one_that_imports_it_back(package: str) -> None:
    graph = module_graph()
    assert not import_cycles(contracted(graph, parts_of(package, graph)))


@pytest.mark.parametrize("name", DRAWN)
def test_the_drawing_is_current(name: str) -> None:
    """``python -m tests.architecture.drawing`` draws it anew."""
    assert (DRAWINGS / name).read_text() == DRAWN[name]()


def test_what_cycles_are() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"b"}, "d": set[str]()}
    assert import_cycles(graph) == [["b", "c"]]


def test_arrows_that_follow_from_others_are_left_out() -> None:
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": set[str]()}
    assert transitive_reduction(graph) == {"a": {"b"}, "b": {"c"}, "c": set()}


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
    assert imported_modules(statement, ROOT / "store" / "file.py") == expected
