"""The imports of the sources, read without running them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import tilework

ROOT = Path(tilework.__file__ or "").parent
FILES = sorted(ROOT.rglob("*.py"))

#: From the bottom up; a layer may import itself and those before it.
LAYERS = (
    "_core",
    "errors",
    "late_names",
    "from_torch",
    "cores",
    "forks",
    "framed",
    "huge_pages",
    "memory_files",
    "optional_core",
    "wait_graph",
    "show",
    "layout",
    "store",
    "rendezvous",
    "comm",
    "mesh",
    "distributed",
    "tiled",
    "models",
    "rpc",
    "sharded",
    "dtensor",
    "interop",
    "data",
    "checkpoint",
    "parallel",
    "capture",
    "inspect",
    "plan",
    "torch_backend",
    "testing",
    "launch",
    "cli",
    "__main__",
)

#: A directed graph: for each node those that it points to.
Graph = Mapping[str, set[str]]


@dataclass(frozen=True)
class Import:
    """One imported module, and the line that imports it."""

    importer: str
    module: str
    where: str
    late: bool
    """True within a function."""


def module_name(path: Path) -> str:
    """The full name of the module in a file."""
    parts = ("tilework", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports_of(path: Path) -> Iterator[Import]:
    """Every import of a file, those in functions and under ``TYPE_CHECKING`` included."""
    importer = module_name(path)

    def visit(node: ast.AST, late: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            for module in imported_modules(child, path):
                where = f"{path.relative_to(ROOT.parent)}:{getattr(child, 'lineno', 0)}"
                yield Import(importer, module, where, late)
            function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from visit(child, late or function)

    yield from visit(tree(path), late=False)


def imported_modules(node: ast.AST, path: Path) -> list[str]:
    """The full names of the modules that a statement imports."""
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
    """True if a module of this full name is part of the package."""
    if name == "tilework._core":  # compiled
        return True
    path = ROOT.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def layer_of(module: str) -> str | None:
    """The layer of a module; None for the bare package and for modules of others."""
    parts = module.split(".")
    return parts[1] if parts[0] == "tilework" and len(parts) > 1 else None


@cache
def all_imports() -> list[Import]:
    """The imports of every module of the package."""
    return [each for path in FILES for each in imports_of(path)]


def module_graph() -> dict[str, set[str]]:
    """The modules of the package and the modules that each imports."""
    graph: dict[str, set[str]] = {module_name(path): set() for path in FILES}
    for each in all_imports():
        if each.module in graph and each.module != each.importer:
            graph[each.importer].add(each.module)
    return graph


def import_cycles(graph: Graph) -> list[list[str]]:
    """The sets of modules that import each other, directly or through others.

    These are the strongly connected components of more than one node (Tarjan, 1972).
    """
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for after in sorted(graph[node]):
            if after not in index:
                visit(after)
                low[node] = min(low[node], low[after])
            elif after in stack:
                low[node] = min(low[node], index[after])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                cycles.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return cycles


def contracted(graph: Graph, groups: Mapping[str, str]) -> dict[str, set[str]]:
    """The graph of groups of nodes: an edge where some member imports one of another group."""
    edges: dict[str, set[str]] = {group: set() for group in groups.values()}
    for node, after in graph.items():
        if node in groups:
            ends = {groups[other] for other in after if other in groups}
            edges[groups[node]] |= ends - {groups[node]}
    return edges


def reachable(graph: Graph, starts: Iterable[str]) -> set[str]:
    """The nodes that paths from ``starts`` lead to, without the starts themselves."""
    seen: set[str] = set()
    todo = [after for start in starts for after in graph[start]]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo.extend(graph[node])
    return seen


def transitive_reduction(graph: Graph) -> dict[str, set[str]]:
    """The fewest edges of an acyclic graph from which all others follow."""
    return {node: after - reachable(graph, after) for node, after in graph.items()}
