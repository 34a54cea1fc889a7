"""The arguments of a call as leaves, with those in dataclasses and in mappings of any class."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import is_dataclass
from itertools import count
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_map


class StepCall(NamedTuple):
    """A call of a step, with the leaves of the arguments (see :func:`flatten`)."""

    step: Callable[..., Any]
    name: str
    leaves: Sequence[Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        """Run the step itself, and return the result."""
        return self.step(*self.args, **self.kwargs)


def is_size(leaf: Any) -> bool:
    """True for a torch.Size, which torch's trees take for a tuple."""
    return isinstance(leaf, torch.Size)


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of a tree, and the structure, which is equal for calls of one kind.

    Containers are torch's (lists, tuples, dicts, named tuples), dataclasses and other mappings.
    """
    leaves: list[Any] = []

    def structure_of(tree: Any) -> Any:
        found, spec = tree_flatten(tree, is_size)
        opened: list[Any] = []
        for leaf in found:
            parts = _parts_of(leaf)
            if parts is None:
                leaves.append(leaf)
            opened.append(None if parts is None else (type(leaf), structure_of(parts)))
        return _hashable(spec), tuple(opened) if any(opened) else ()

    return leaves, structure_of(tree)


def _hashable(spec: Any) -> Any:
    try:
        hash(spec)
    except TypeError:  # torch 2.6
        return repr(spec)
    return spec


def replaced(tree: Any, new: dict[int, Any]) -> Any:
    """A copy of a tree of arguments with other leaves, by their positions in :func:`flatten`."""
    numbers = count()

    def put(leaf: Any) -> Any:
        parts = _parts_of(leaf)
        if parts is None:
            return new.get(next(numbers), leaf)
        return _with_parts(leaf, tree_map(put, parts, is_leaf=is_size))

    return tree_map(put, tree, is_leaf=is_size)


def _with_parts(leaf: Any, parts: dict[str, Any]) -> Any:
    """A copy of an object with other parts."""
    leaf = copy.copy(leaf)
    for name, value in parts.items():
        if isinstance(leaf, MutableMapping):
            leaf[name] = value
        else:
            object.__setattr__(leaf, name, value)
    return leaf


def _parts_of(leaf: Any) -> dict[str, Any] | None:
    if isinstance(leaf, MutableMapping):
        return dict(leaf.items())
    if is_dataclass(leaf) and not isinstance(leaf, type):
        names = {**leaf.__dataclass_fields__, **getattr(leaf, "__dict__", {})}
        return {name: getattr(leaf, name) for name in names if hasattr(leaf, name)}
    return None
