"""States of containers as flat mappings, and back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from tilework.checkpoint.flat_state import FlatState, FlatValue, children_of, dotted
from tilework.checkpoint.format import MOST_DEPTH, Path
from tilework.checkpoint.values import KIND, decode_value, encode_value, is_plain_sequence
from tilework.comm.per_call.internal import awaited
from tilework.dtensor import DTensor
from tilework.dtensor.internal import is_torch_dtensor

T = TypeVar("T")
#: The maximum of levels: an index needs a few around the state, and up to five for a value.
_MOST_LEVELS = MOST_DEPTH - 10
#: Makes plain containers of an object, or returns an unknown value unchanged.
Adapt = Callable[[Any, Path], Any]


def flatten(state: Any, adapt: Adapt = lambda value, path: value) -> FlatState:
    """The state as a flat mapping from paths to leaves. ``adapt`` makes containers of objects."""
    flat = FlatState()
    _flatten(state, (), adapt, flat, 0)
    return flat


def check_levels(levels: int, path: Path) -> None:
    """Raise TypeError if the value at ``path`` is too deep for an index."""
    if levels > _MOST_LEVELS:
        raise TypeError(
            f"the state is nested too deep at {dotted(path[:4])}…: an index holds at most "
            f"{MOST_DEPTH} levels. Does a container hold itself?"
        )


def found_in(state: Any, kind: type[T], path: Path = ()) -> Iterator[tuple[Path, T]]:
    """The values of a class in a nesting of dicts, lists and tuples, each with the path."""
    check_levels(len(path), path)
    if isinstance(state, kind):
        yield path, state
    elif isinstance(state, Mapping | list | tuple):
        pairs = state.items() if isinstance(state, Mapping) else enumerate(state)
        for key, value in pairs:
            yield from found_in(value, kind, (*path, key))


def _flatten(value: Any, path: Path, adapt: Adapt, flat: FlatState, levels: int) -> None:
    check_levels(levels, path)
    value = adapt(value, path)
    if isinstance(value, Tensor):
        flat.leaves[path] = DTensor.from_torch(value) if is_torch_dtensor(value) else awaited(value)
    elif isinstance(value, Mapping):
        flat.containers[path] = "dict"
        plain = all(type(key) is str for key in value) and KIND not in value
        for key, inner in value.items():
            _check_key(key, path)
            _flatten(inner, (*path, key), adapt, flat, levels + (1 if plain else 3))
    elif isinstance(value, list | tuple) and not is_plain_sequence(value):
        flat.containers[path] = "list" if isinstance(value, list) else "tuple"
        for number, inner in enumerate(value):
            _flatten(
                inner, (*path, number), adapt, flat, levels + (1 if isinstance(value, list) else 2)
            )
    elif isinstance(value, set | frozenset):
        flat.containers[path] = "set"
        for number, inner in enumerate(sorted(value, key=repr)):
            _check_in_set(adapt(inner, path), path)
            _flatten(inner, (*path, number), adapt, flat, levels + 2)
    elif is_numpy_array(value):
        flat.containers[path] = "numpy"
        flat.leaves[(*path, 0)] = numpy_as_tensor(value, dotted(path))
    else:
        flat.leaves[path] = FlatValue(encode_value(value, dotted(path)))


def _check_in_set(value: Any, path: Path) -> None:
    """Raise TypeError if a value in a set became a dict or list, which no set can hold."""
    if isinstance(value, Mapping | list):
        raise TypeError(
            f"{dotted(path)} is a set with an object whose state is a {type(value).__name__}: "
            f"save a list or a dict of such objects"
        )
    for each in value if isinstance(value, tuple) else ():
        _check_in_set(each, path)


def is_numpy_array(value: Any) -> bool:
    """True for an array of numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def numpy_as_tensor(array: Any, where: str) -> Tensor:
    """A numpy array as a tensor that shares memory if torch can, else as a copy."""
    try:
        plain = array.astype(array.dtype.newbyteorder("="), copy=False)
        shares = plain.flags.writeable and all(stride >= 0 for stride in plain.strides)
        return torch.from_numpy(plain if shares else plain.copy())
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{where} is an array of numpy's of dtype {array.dtype}, which a checkpoint does not "
            f"hold: {error}"
        ) from None


def _check_key(key: Any, path: Path) -> None:
    if not isinstance(key, str | int | float | bool | None):
        raise TypeError(
            f"{dotted(path)} has the key {key!r} of type {type(key).__name__}: keys of a "
            f"checkpoint's dicts are strings, numbers, bools or None"
        )


# -- back to containers ----------------------------------------------------------------------


def rebuild(flat: FlatState, root: Path = ()) -> Any:
    """Build the nested state at ``root`` from a flat state. Values are decoded."""
    children = children_of(flat)

    def build(path: Path, is_in_set: bool = False) -> Any:
        kind = flat.containers.get(path)
        if kind is None:
            leaf = flat.leaves[path]
            return decode_value(leaf.json) if isinstance(leaf, FlatValue) else leaf
        is_set = kind == "set"
        pairs = [(key, build((*path, key), is_in_set or is_set)) for key in children.get(path, ())]
        if kind == "dict":
            return dict(pairs)
        values = [value for _, value in pairs]
        if kind == "numpy":
            return _as_array(values[0]) if values else None
        if is_set:
            return _as_set(values, is_in_set)
        return {"list": list, "tuple": tuple}[kind](values)

    return build(root)


def _as_array(value: Any) -> Any:
    """The numpy array of a tensor. Other values, and tensors without a numpy dtype, unchanged."""
    try:
        return value.numpy() if isinstance(value, Tensor) else value
    except TypeError:  # of a dtype that numpy lacks
        return value


def _as_set(values: list[Any], is_in_set: bool) -> Any:
    try:
        return frozenset(values) if is_in_set else set(values)
    except TypeError:
        return tuple(values) if is_in_set else values
