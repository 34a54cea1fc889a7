"""Functions of the sources by complexity: ``python -m tests.architecture.complexity`` lists them.

The complexity of a function is 1 + branches, loops, handlers, comprehensions and boolean operators,
those of inner functions included.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.architecture.imports import FILES, ROOT, tree

#: The most that a function should have.
MOST = 15
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.comprehension)
_ONE_EACH = (ast.If, ast.IfExp, ast.ExceptHandler, *_LOOPS)


def complexity(function: ast.AST) -> int:
    """1 + branches, loops, handlers, comprehensions and boolean operators in a function."""
    found = list(ast.walk(function))
    operators = sum(len(each.values) - 1 for each in found if isinstance(each, ast.BoolOp))
    return 1 + sum(isinstance(each, _ONE_EACH) for each in found) + operators


def functions_above(most: int = MOST) -> Iterator[tuple[int, str]]:
    """The functions of the sources with a higher complexity, and what it is."""
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, _FUNCTIONS) and complexity(node) > most:
                yield complexity(node), f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"


if __name__ == "__main__":
    for number, name in sorted(functions_above(), reverse=True):
        print(f"{number:3} {name}")
