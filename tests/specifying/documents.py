"""Test suites inside documents: code fences, whose imports are all that is changed.

The documents lie in the folder that ``TILEWORK_SEEDS`` names. What a document has lost (code that
does not parse) is left out method by method. On a machine without GPUs a device is named ``cpu``
where the document says ``cuda:1``, and the backend that serves it where it says ``nccl``; a port
that the document fixes is one that is free.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.specifying import harness
from tilework.from_torch import MODULES

_FENCE = re.compile(r"^```\w*\n(.*?)^```", re.S | re.M)
_HEADER = "class DTensorAPITest(DTensorTestBase):\n"
#: Modules of torch's whose names are elsewhere here, or nowhere.
_ELSEWHERE = {
    "torch.distributed.remote_device": "tilework.sharded",
    "torch.distributed._shard._utils": "tilework.sharded",
    "torch.distributed._tensor": "tilework.dtensor",
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook": "tilework.parallel.comm_hooks",
}
_NAMES = {"_remote_device": "RemoteDevice"}
_DEVICES = (
    (re.compile(r"cuda:(\d|\{[^}]*\})"), "cpu"),
    (re.compile(r'(?<=[(=])"cuda"'), '"cpu"'),
    (re.compile(r"\.cuda\([\w.]*\)"), ".cpu()"),
    (re.compile(r"torch\.cuda\.current_device\(\)"), '"cpu"'),
    (re.compile(r'backend="nccl"'), "backend=None"),
    (re.compile(r'"6789"'), 'os.environ["MASTER_PORT"]'),  # one that is free
)


class Unknown:
    """Stands for a name that tilework has not: whoever uses it fails."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"tilework has no {self._name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise AttributeError(f"tilework has no {self._name}")


@dataclass
class Document:
    """The code of a document, as a module that was run."""

    name: str
    namespace: dict[str, Any]
    #: Methods that the document has lost a part of.
    damaged: list[str] = field(default_factory=list)

    def tests(self) -> Iterator[tuple[str, str]]:
        """Each class and method."""
        for name, thing in sorted(self.namespace.items()):
            own = isinstance(thing, type) and thing.__module__ == self.name
            if own and issubclass(thing, harness.TestCase):
                for method in sorted(vars(thing)):
                    if method.startswith("test") and callable(getattr(thing, method)):
                        yield name, method


@cache
def documents() -> list[Document]:
    """The documents with tests, in the order of their names; none where no folder is named."""
    folder = os.environ.get("TILEWORK_SEEDS")
    if not folder:
        return []
    found = []
    for path in sorted(Path(folder).iterdir()):
        text = path.read_text(errors="replace") if path.is_file() else ""
        for fence in _FENCE.findall(text):
            if "def test_" in fence:
                found.append(_loaded(path.name.partition("_")[0], fence))
    return found


def _loaded(name: str, code: str) -> Document:
    if code.startswith("    @"):  # a class without its first line
        code = _HEADER + code
    for pattern, ours in _DEVICES:
        code = pattern.sub(ours, code)
    tree, damaged = _parsed(code)
    document = Document(f"document_{name}", {"__name__": f"document_{name}"}, damaged)
    if _HEADER in code:
        document.namespace.update(_names_of_dtensor())
    rest = []
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            _bring(node, document.namespace)
        else:
            rest.append(node)
    for node in rest:
        _run(node, document)
    return document


def _run(node: ast.stmt, document: Document) -> None:
    """Run one statement; what needs what nobody has is damaged."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef):
            inner.body = _with_imports_changed(inner.body)
    module = ast.fix_missing_locations(ast.Module([node], []))
    try:
        exec(compile(module, document.name, "exec"), document.namespace)
    except Exception as error:
        document.damaged.append(f"{getattr(node, 'name', 'statement')}: {error!r}")


def _with_imports_changed(body: list[ast.stmt]) -> list[ast.stmt]:
    changed: list[ast.stmt] = []
    for node in body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.dist"):
            for alias in node.names:
                bring = ast.Call(
                    ast.Name("__bring__", ast.Load()),
                    [ast.Constant(node.module), ast.Constant(alias.name)],
                    [],
                )
                target = ast.Name(alias.asname or alias.name, ast.Store())
                changed.append(ast.Assign([target], bring))
        else:
            changed.append(node)
    return changed


def _parsed(code: str) -> tuple[ast.Module, list[str]]:
    """The code without the methods that do not parse, and their names."""
    damaged: list[str] = []
    lines = code.split("\n")
    while True:
        try:
            return ast.parse("\n".join(lines)), damaged
        except SyntaxError as error:
            start, end = _method_around(lines, (error.lineno or 1) - 1)
            damaged.append(lines[start].strip())
            lines[start:end] = [""] * (end - start)


_START = re.compile(r"( {4})?(def |class |@)")


def _method_around(lines: list[str], at: int) -> tuple[int, int]:
    at = min(at, len(lines) - 1)
    start = at
    while start > 0 and not lines[start].startswith("    def "):
        start -= 1
    end = max(at + 1, start + 1)
    while end < len(lines) and not _START.match(lines[end]):
        end += 1
    while start > 0 and lines[start - 1].startswith("    @"):
        start -= 1
    return start, end


# -- imports ---------------------------------------------------------------------------------


def bring(module: str, name: str) -> Any:
    """What ``from module import name`` of the document gets."""
    if module.startswith("torch.testing"):
        found = getattr(harness, name, None)
        return found if found is not None else _of_torch(module, name)
    if not module.startswith(("torch.distributed", "torch.nn.parallel")):
        return _of_torch(module, name)
    whole = _ours(f"{module}.{name}", exact=True)
    if whole is not None:
        return whole
    if (module, name) == ("torch.distributed", "rpc"):
        return importlib.import_module("tilework.rpc")
    ours = _ours(module)
    for spelled in (_NAMES.get(name, name), name.lstrip("_")):
        if ours is not None and hasattr(ours, spelled):
            return getattr(ours, spelled)
    return Unknown(f"{module}.{name}")


def _of_torch(module: str, name: str) -> Any:
    try:
        there = importlib.import_module(module)
        return getattr(there, name) if hasattr(there, name) else Unknown(f"{module}.{name}")
    except ImportError:
        return Unknown(f"{module}.{name}")


def _ours(module: str, exact: bool = False) -> ModuleType | None:
    table = {**MODULES, **_ELSEWHERE}
    while module:
        if module in table:
            return importlib.import_module(table[module])
        if exact:
            return None
        module = module.rpartition(".")[0]
    return None


def _bring(node: ast.Import | ast.ImportFrom, namespace: dict[str, Any]) -> None:
    namespace["__bring__"] = bring
    if isinstance(node, ast.ImportFrom):
        for alias in node.names:
            namespace[alias.asname or alias.name] = bring(node.module or "", alias.name)
        return
    for alias in node.names:
        if alias.name.startswith("torch.testing"):
            namespace[alias.asname or "torch"] = harness
        elif alias.name.startswith("torch.distributed"):
            ours = _ours(alias.name)
            namespace[alias.asname or alias.name] = ours or Unknown(alias.name)
        else:
            module = importlib.import_module(alias.name)
            top = importlib.import_module(alias.name.partition(".")[0])
            namespace[alias.asname or top.__name__] = module if alias.asname else top


def _names_of_dtensor() -> dict[str, Any]:
    """What the lost first lines of the suite of DTensor's functions have imported."""
    import torch
    from torch import nn

    import tilework.dtensor as dtensor

    return {
        **{name: getattr(dtensor, name) for name in dtensor.__all__},
        "torch": torch,
        "nn": nn,
        "with_comms": harness.with_comms,
        "DTensorTestBase": harness.DTensorTestBase,
        "run_tests": lambda: None,
        "MyModel": harness.MyModel,
        "CommDebugMode": dtensor.CommDebugMode,
    }
