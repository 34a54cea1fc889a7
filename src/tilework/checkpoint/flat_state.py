"""States as flat mappings: each tensor and each other value by the keys that lead to it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilework.checkpoint.format import MOST_DEPTH, Path
from tilework.checkpoint.values import KIND, decode_value, encode_value, is_plain_sequence
from tilework.comm.checks import awaited
from tilework.dtensor import DTensor
from tilework.dtensor.torch_tensors import is_torch_dtensor

#: Numbers that JSON has no exact ones for.
_NUMBERS = ("int", "float")
#: The index needs a few levels around the state, and up to five for a value.
_MOST_LEVELS = MOST_DEPTH - 10
#: Makes plain containers of an object, or returns what it does not know as it is.
Adapt = Callable[[Any, Path], Any]


@dataclass(frozen=True, slots=True)
class Value:
    """A value that is no tensor, as JSON."""

    json: Any


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor of a checkpoint, in the place of the tensor in its state."""

    name: str
    kind: str = "tensor"


@dataclass(frozen=True, slots=True)
class PerRank:
    """A value that differs between ranks: for each group of ranks, its own."""

    variants: tuple[tuple[tuple[int, ...], Value | NamedTensor], ...]

    def of(self, rank: int) -> Value | NamedTensor | None:
        """The value of one rank; None if it had none."""
        return next((leaf for ranks, leaf in self.variants if rank in ranks), None)


Leaf = Value | NamedTensor | PerRank


@dataclass
class FlatState:
    """A state by paths.

    Args:
        leaves: Tensors, and values as :class:`Value`; after reading, tensors by name.
        containers: The kind of each container: "dict", "list", "tuple", "set" or "numpy".
    """

    leaves: dict[Path, Any] = field(default_factory=dict)
    containers: dict[Path, str] = field(default_factory=dict)


def dotted(path: Path) -> str:
    """A path for people, and the name of a tensor there.

    Example:
        >>> dotted(("model", "0.weight")), dotted(())
        ('model.0.weight', 'state')
    """
    return ".".join(map(str, path)) or "state"


def flatten(state: Any, adapt: Adapt = lambda value, path: value) -> FlatState:
    """The state by paths. Local, unless ``adapt`` is not.

    Args:
        state: Any nesting of dicts, lists, tuples, sets, tensors and values.
        adapt: Makes containers of other objects.

    Raises:
        TypeError: It has something that a checkpoint does not hold; the message says where.

    Example:
        >>> flat = flatten({"a": [1, {"b": 2}]})
        >>> list(flat.leaves), flat.containers
        ([('a', 0), ('a', 1, 'b')], {(): 'dict', ('a',): 'list', ('a', 1): 'dict'})
    """
    flat = FlatState()
    _flatten(state, (), adapt, flat, 0)
    return flat


def check_levels(levels: int, path: Path) -> None:
    """Refuse a state that is nested deeper than an index may be.

    Args:
        levels: The levels of JSON that are known to lead to the path.
        path: Where.

    Raises:
        TypeError: It is; perhaps something contains itself.
    """
    if levels > _MOST_LEVELS:
        raise TypeError(
            f"the state is nested too deep at {dotted(path[:4])}…: an index of {MOST_DEPTH} levels "
            f"does not hold it. Does a container hold itself?"
        )


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
        flat.leaves[path] = Value(encode_value(value, dotted(path)))


def _check_in_set(value: Any, path: Path) -> None:
    """Refuse what a set cannot have when it is read: an object whose state is a container."""
    if isinstance(value, Mapping | list):
        raise TypeError(
            f"{dotted(path)} is a set with an object whose state is a {type(value).__name__}: "
            f"save a list or a dict of such objects"
        )
    for each in value if isinstance(value, tuple) else ():
        _check_in_set(each, path)


def is_numpy_array(value: Any) -> bool:
    """True for an array of numpy's."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def numpy_as_tensor(array: Any, where: str) -> Tensor:
    """A numpy array as a tensor that shares its memory if torch can, else has a copy.

    Args:
        array: The array.
        where: Its place in the state, for messages.

    Raises:
        TypeError: Its elements are no numbers that torch has.
    """
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


# -- as JSON ---------------------------------------------------------------------------------


def state_json(flat: FlatState) -> Any:
    """The JSON of a state whose tensors are :class:`NamedTensor`."""
    children = _children(flat)

    def build(path: Path) -> Any:
        kind = flat.containers.get(path)
        if kind is None:
            return _leaf_json(flat.leaves[path])
        inner = [(key, build((*path, key))) for key in children.get(path, ())]
        if kind == "list":
            return [value for _, value in inner]
        if kind == "dict":
            if all(type(key) is str for key, _ in inner) and KIND not in children.get(path, ()):
                return dict(inner)
            pairs = [[encode_value(key, dotted(path)), value] for key, value in inner]
            return {KIND: "dict", "v": pairs}
        return {KIND: kind, "v": [value for _, value in inner]}

    return build(()) if flat.leaves or flat.containers else None


def _children(flat: FlatState) -> dict[Path, list[Any]]:
    children: dict[Path, dict[Any, None]] = {}
    for path in (*flat.containers, *flat.leaves):
        if path:
            children.setdefault(path[:-1], {})[path[-1]] = None
    ordered = {path: list(keys) for path, keys in children.items()}
    for path, keys in ordered.items():
        if flat.containers.get(path) != "dict":
            keys.sort()
    return ordered


def _leaf_json(leaf: Any) -> Any:
    if isinstance(leaf, Value):
        return leaf.json
    if isinstance(leaf, PerRank):
        listed = [{"ranks": list(ranks), "v": _leaf_json(each)} for ranks, each in leaf.variants]
        return {KIND: "per_rank", "v": listed}
    return {KIND: leaf.kind, "v": leaf.name}


def state_of_json(listed: Any) -> FlatState:
    """The state that :func:`state_json` made JSON of.

    Raises:
        ValueError: It is JSON of something else.
    """
    flat = FlatState()
    try:
        for path, kind, value in _walk(listed, ()):
            if path in flat.leaves or path in flat.containers:
                raise ValueError(f"it has two values at {dotted(path)}")
            if kind == "leaf":
                flat.leaves[path] = value
            else:
                flat.containers[path] = kind
    except (TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"it is not as docs/format.md says ({error})") from error
    return flat


def _walk(listed: Any, path: Path) -> Iterator[tuple[Path, str, Any]]:
    kind = listed.get(KIND) if isinstance(listed, dict) else None
    if isinstance(listed, dict) and kind is None:
        pairs: Any = list(listed.items())
        kind = "dict"
    elif _is_plain(listed["v"] if kind == "tuple" else listed):
        yield path, "leaf", Value(listed)
        return
    elif isinstance(listed, list):
        pairs, kind = list(enumerate(listed)), "list"
    elif kind == "dict":
        pairs = [(_key_of(key), value) for key, value in listed["v"]]
    elif kind in ("tuple", "set", "numpy"):
        pairs = list(enumerate(listed["v"]))
        if kind == "set" and not all(_can_be_in_set(value) for _, value in pairs):
            raise ValueError("a set has lists or dicts in it")
        if kind == "numpy" and (len(pairs) != 1 or not _may_be_array(pairs[0][1])):
            raise ValueError("an array of numpy's is not one tensor")
    else:
        yield path, "leaf", _leaf_of(listed)
        return
    yield path, kind, None
    for key, value in pairs:
        yield from _walk(value, (*path, key))


def _key_of(listed: Any) -> Any:
    key = decode_value(listed)
    if not isinstance(key, str | int | float | bool | None):
        raise ValueError(f"{key!r:.60} is no key of a dict")
    return key


def _may_be_array(listed: Any) -> bool:
    return isinstance(listed, dict) and listed.get(KIND) in ("tensor", "per_rank")


def _can_be_in_set(listed: Any) -> bool:
    if not isinstance(listed, dict):
        return not isinstance(listed, list)
    if listed.get(KIND) in ("tuple", "set"):
        return all(map(_can_be_in_set, listed["v"]))
    return listed.get(KIND) not in (None, "dict", "numpy")


def _is_plain(listed: Any) -> bool:
    """True for the JSON of what :func:`is_plain_sequence` tells."""
    return (
        isinstance(listed, list)
        and len(listed) > 0
        and all(
            not isinstance(v, list | dict) or (isinstance(v, dict) and v.get(KIND) in _NUMBERS)
            for v in listed
        )
    )


def _leaf_of(listed: Any) -> Leaf:
    kind = listed.get(KIND) if isinstance(listed, dict) else None
    if kind == "tensor":
        if not isinstance(listed["v"], str):
            raise ValueError(f"{listed['v']!r} is no tensor's name")
        return NamedTensor(listed["v"])
    if kind == "per_rank":
        variants = []
        for each in listed["v"]:
            leaf = _leaf_of(each["v"])
            if isinstance(leaf, PerRank):
                raise ValueError("values per rank are nested")
            variants.append((tuple(map(int, each["ranks"])), leaf))
        if not variants:
            raise ValueError("values per rank are of no rank")
        return PerRank(tuple(variants))
    decode_value(listed)  # raises what is wrong with it
    return Value(listed)


# -- back to containers ----------------------------------------------------------------------


def rebuild(flat: FlatState, root: Path = ()) -> Any:
    """The containers and what is in them, from ``root`` on. Values are decoded."""
    children = _children(flat)

    def build(path: Path, is_in_set: bool = False) -> Any:
        kind = flat.containers.get(path)
        if kind is None:
            leaf = flat.leaves[path]
            return decode_value(leaf.json) if isinstance(leaf, Value) else leaf
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
    """The array of numpy's that a tensor was; what can be none as it is, as one for each rank."""
    try:
        return value.numpy() if isinstance(value, Tensor) else value
    except TypeError:  # of a dtype that numpy has not
        return value


def _as_set(values: list[Any], is_in_set: bool) -> Any:
    """A set; a list if some value cannot be in one, as what was saved for each rank."""
    try:
        return frozenset(values) if is_in_set else set(values)
    except TypeError:
        return tuple(values) if is_in_set else values
