"""Private attributes that a package reads of objects whose classes another package defines."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from tests.architecture.imports import FILES, ROOT, tree

#: Private attributes of torch's and Python's classes that some class here has, too.
OF_OTHERS = {"_base", "_version", "_buffers", "_modules", "_parameters", "_load_from_state_dict"}
OF_OTHERS |= {"_devices", "_timeout"}


def foreign_private_names() -> list[str]:
    """The reads of private attributes that only classes of other packages define, as texts.

    The object's class is not known: an attribute counts as the own package's if any class of the
    package has the name.
    """
    homes: dict[str, set[str]] = defaultdict(set)
    reads = []
    for path in FILES:
        package = path.relative_to(ROOT).parts[0].removesuffix(".py")
        for node in ast.walk(tree(path)):
            for name in _defined(node):
                homes[name].add(package)
            if isinstance(node, ast.Attribute) and _is_private(node.attr) and not _of_self(node):
                place = f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
                reads.append((package, node.attr, place))
    known = homes.keys() - OF_OTHERS
    return [text for package, name, text in reads if name in known and package not in homes[name]]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _defined(node: ast.AST) -> Iterator[str]:
    """The names that a node defines in a class: methods, fields, and what methods assign."""
    if isinstance(node, ast.Attribute) and _of_self(node) and isinstance(node.ctx, ast.Store):
        yield node.attr
    for each in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(each, ast.FunctionDef):
            yield each.name
        elif isinstance(each, ast.AnnAssign):
            yield ast.unparse(each.target)
        elif isinstance(each, ast.Assign):
            yield from (ast.unparse(target) for target in each.targets)
