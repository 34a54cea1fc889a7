"""The examples in docstrings do what they show."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import tilework

_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def _modules() -> list[str]:
    found = pkgutil.walk_packages(tilework.__path__, "tilework.")
    return sorted(module.name for module in found if not module.name.endswith("_core"))


@pytest.mark.parametrize("name", _modules())
def test_examples(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name), optionflags=_FLAGS)
    assert results.failed == 0, f"{results.failed} of {results.attempted} examples: see above"
