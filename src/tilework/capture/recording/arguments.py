"""The arguments of a call as leaves, with those in dataclasses and in mappings of any class."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import is_dataclass
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten


class StepCall(NamedTuple):
    """A call of a step.

    Attributes:
        step: The step.
        name: The name of the step.
        leaves: The leaves of the arguments; see :func:`flatten`.
        args: The arguments.
        kwargs: The keyword arguments.
    """

    step: Callable[..., Any]
    name: str
    leaves: Sequence[Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self) -> Any:
        """Run the step itself, and return the result."""
        return self.step(*self.args, **self.kwargs)


class OpenedArgument(NamedTuple):
    """An object among the leaves whose parts are leaves themselves.

    Attributes:
        kind: The class of the object.
        structure: The structure of the object's attributes, or of a mapping's items.
    """

    kind: type
    structure: Structure


class Structure(NamedTuple):
    """The structure of a tree of arguments; structures of calls of one kind are equal.

    Attributes:
        spec: torch's structure of the tree.
        opened: For each of torch's leaves, how it was opened; None: it is a leaf.
    """

    spec: Any
    opened: tuple[OpenedArgument | None, ...]


def is_size(leaf: Any) -> bool:
    """True for a torch.Size, which torch's trees take for a tuple."""
    return isinstance(leaf, torch.Size)


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    """The leaves of a tree, and the structure.

    Containers are those that torch knows (lists, tuples, dicts, named tuples), dataclasses and
    other mappings.
    """
    found, spec = tree_flatten(tree, is_size)
    leaves: list[Any] = []
    opened: list[OpenedArgument | None] = []
    for leaf in found:
        parts = _parts_of(leaf)
        if parts is None:
            leaves.append(leaf)
            opened.append(None)
        else:
            inner, structure = flatten(parts)
            leaves += inner
            opened.append(OpenedArgument(type(leaf), structure))
    return leaves, Structure(_hashable(spec), tuple(opened) if any(opened) else ())


def _hashable(spec: Any) -> Any:
    try:
        hash(spec)
    except TypeError:  # torch 2.6
        return repr(spec)
    return spec


def replaced(tree: Any, new: dict[int, Any]) -> Any:
    """A copy of a tree of arguments with other leaves.

    Args:
        tree: The tree.
        new: The new leaves, by the position of the leaf in :func:`flatten`.
    """
    return _replaced(tree, new, 0)[0]


def _replaced(tree: Any, new: dict[int, Any], first: int) -> tuple[Any, int]:
    found, spec = tree_flatten(tree, is_size)
    made = []
    for leaf in found:
        parts = _parts_of(leaf)
        if parts is None:
            made.append(new.get(first, leaf))
            first += 1
            continue
        inner, first = _replaced(parts, new, first)
        made.append(_with_parts(leaf, inner))
    return tree_unflatten(made, spec), first


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
