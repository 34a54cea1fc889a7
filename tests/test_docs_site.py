"""The documentation's site has a page for each public package (``make docs`` checks its links)."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.test_package import PUBLIC

ROOT = Path(__file__).parents[1]


def packages_of_the_site() -> dict[str, str]:
    """``PACKAGES`` of docs/site/hooks.py, which imports mkdocs: not installed with the tests."""
    tree = ast.parse((ROOT / "docs/site/hooks.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PACKAGES":
            packages: dict[str, str] = ast.literal_eval(node.value)
            return packages
    raise AssertionError("docs/site/hooks.py has no PACKAGES")


def test_each_public_package_has_a_page() -> None:
    assert set(PUBLIC) <= set(packages_of_the_site())


def test_each_page_of_a_package_names_what_exists() -> None:
    sources = ROOT / "src"
    for package in packages_of_the_site():
        path = sources / package.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), package
