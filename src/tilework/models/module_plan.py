"""Modules and their plans: names are exact, or patterns with wildcards between the dots."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn


def check_is_module(module: Any, function: str) -> None:
    """Raise TypeError unless a function was given a module."""
    if isinstance(module, nn.Module):
        return
    if isinstance(module, type) and issubclass(module, nn.Module):
        got = f"the class {module.__name__}: make one first, {module.__name__}(…)"
    else:
        got = type(module).__name__
    raise TypeError(f"{function} takes an nn.Module, got {got}")


def is_pattern(name: str) -> bool:
    """True if the name has wildcards."""
    return any(char in name for char in "*?[")


def matching_names(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that match the pattern, in order; a wildcard matches no dot.

    Example:
        >>> matching_names("*.weight", ["0.weight", "0.bias", "1.norm.weight"])
        ['0.weight']
    """
    wanted = pattern.split(".")

    def matches(name: str) -> bool:
        parts = name.split(".")
        return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))

    return [name for name in names if matches(name)]


def close_names(name: str, names: Iterable[str], cutoff: float = 0.6) -> list[str]:
    """The names most similar to a mistyped name, for error messages."""
    return difflib.get_close_matches(name, list(names), n=3, cutoff=cutoff)


def split_name(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The submodule that owns the named attribute, and the last part of the name."""
    owner, _, last = name.rpartition(".")
    return module.get_submodule(owner), last


def replace_module(root: nn.Module, module: nn.Module, made: nn.Module) -> None:
    """Put another module, perhaps around ``module``, in all places of ``module`` in ``root``."""
    # All places are found before any is filled: modules() would continue into a wrapper.
    places = [
        (parent, name)
        for parent in root.modules()
        for name, child in parent._modules.items()
        if child is module
    ]
    for parent, name in places:
        setattr(parent, name, made)
