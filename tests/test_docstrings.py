"""The examples in docstrings do what they show."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import tilework

_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def _packages() -> dict[str, list[str]]:
    """The names of all modules, by the package below tilework."""
    packages: dict[str, list[str]] = {}
    for module in pkgutil.walk_packages(tilework.__path__, "tilework."):
        if not module.name.endswith("_core"):
            packages.setdefault(module.name.split(".")[1], []).append(module.name)
    return packages


@pytest.mark.parametrize(("package", "names"), _packages().items(), ids=list(_packages()))
def test_examples(package: str, names: list[str]) -> None:
    for name in names:
        results = doctest.testmod(importlib.import_module(name), optionflags=_FLAGS)
        assert results.failed == 0, f"{results.failed} examples of {name} fail: see above"
