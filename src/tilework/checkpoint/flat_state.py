"""States as flat mappings: each tensor and each other value by the keys that lead to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tilework.checkpoint.format import Path
from tilework.checkpoint.values import KIND, decode_value, encode_value

#: Numbers without an exact form in JSON.
_NUMBERS = ("int", "float")


@dataclass(frozen=True, slots=True)
class FlatValue:
    """A value of a state that is not a tensor, as the index stores it in JSON (docs/format.md)."""

    json: Any


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor of a saved state, or of another kind of tensor, by the name in the checkpoint."""

    name: str
    kind: str = "tensor"


@dataclass(frozen=True, slots=True)
class PerRank:
    """A leaf of a saved state that differs between ranks: the ranks and value of each variant."""

    variants: tuple[tuple[tuple[int, ...], FlatValue | NamedTensor], ...]

    def of(self, rank: int) -> FlatValue | NamedTensor | None:
        return next((leaf for ranks, leaf in self.variants if rank in ranks), None)


Leaf = FlatValue | NamedTensor | PerRank


@dataclass
class FlatState:
    """A state: by path, values and tensors (or their names), and the kinds of containers."""

    leaves: dict[Path, Any] = field(default_factory=dict)
    containers: dict[Path, str] = field(default_factory=dict)


def dotted(path: Path) -> str:
    """The keys and positions of a path, joined by dots; ``"state"`` for the empty path."""
    return ".".join(map(str, path)) or "state"


# -- as JSON ---------------------------------------------------------------------------------


def state_json(flat: FlatState) -> Any:
    """The JSON of a state whose tensors are :class:`NamedTensor`."""
    children = children_of(flat)

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


def children_of(flat: FlatState) -> dict[Path, list[Any]]:
    """The keys of each container, in order."""
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
    if isinstance(leaf, FlatValue):
        return leaf.json
    if isinstance(leaf, PerRank):
        listed = [{"ranks": list(ranks), "v": _leaf_json(each)} for ranks, each in leaf.variants]
        return {KIND: "per_rank", "v": listed}
    return {KIND: leaf.kind, "v": leaf.name}


def state_of_json(listed: Any, check: Callable[[Any], object] = decode_value) -> FlatState:
    """The state that :func:`state_json` encoded. ``check`` may refuse the JSON of a value."""
    flat = FlatState()
    try:
        for path, kind, value in _walk(listed, (), check):
            if path in flat.leaves or path in flat.containers:
                raise ValueError(f"it has two values at {dotted(path)}")
            if kind == "leaf":
                flat.leaves[path] = value
            else:
                flat.containers[path] = kind
    except (TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"it is not as docs/format.md says ({error})") from error
    return flat


def _walk(
    listed: Any, path: Path, check: Callable[[Any], object]
) -> Iterator[tuple[Path, str, Any]]:
    kind = listed.get(KIND) if isinstance(listed, dict) else None
    if isinstance(listed, dict) and kind is None:
        pairs: Any = list(listed.items())
        kind = "dict"
    elif _is_plain(listed["v"] if kind == "tuple" else listed):
        yield path, "leaf", FlatValue(listed)
        return
    elif isinstance(listed, list):
        pairs, kind = list(enumerate(listed)), "list"
    elif kind == "dict":
        pairs = [(_key_of(key), value) for key, value in listed["v"]]
    elif kind in ("tuple", "set", "numpy"):
        pairs = list(enumerate(listed["v"]))
        if kind == "set" and not all(_can_be_in_set(value) for _, value in pairs):
            raise ValueError("a set has lists or dicts in it")
        held = pairs[0][1] if len(pairs) == 1 else None
        is_array = isinstance(held, dict) and held.get(KIND) in ("tensor", "per_rank")
        if kind == "numpy" and not is_array:
            raise ValueError("an array of numpy's is not one tensor")
    else:
        yield path, "leaf", _leaf_of(listed, check)
        return
    yield path, kind, None
    for key, value in pairs:
        yield from _walk(value, (*path, key), check)


def _key_of(listed: Any) -> Any:
    key = decode_value(listed)
    if not isinstance(key, str | int | float | bool | None):
        raise ValueError(f"{key!r:.60} is not a key of a dict")
    return key


def _can_be_in_set(listed: Any) -> bool:
    if not isinstance(listed, dict):
        return not isinstance(listed, list)
    if listed.get(KIND) in ("tuple", "set"):
        return all(map(_can_be_in_set, listed["v"]))
    return listed.get(KIND) not in (None, "dict", "numpy")


def _is_plain(listed: Any) -> bool:
    """True for the JSON of a sequence for which :func:`is_plain_sequence` is true."""
    return (
        isinstance(listed, list)
        and len(listed) > 0
        and all(
            not isinstance(v, list | dict) or (isinstance(v, dict) and v.get(KIND) in _NUMBERS)
            for v in listed
        )
    )


def _leaf_of(listed: Any, check: Callable[[Any], object]) -> Leaf:
    kind = listed.get(KIND) if isinstance(listed, dict) else None
    if kind == "tensor":
        if not isinstance(listed["v"], str):
            raise ValueError(f"{listed['v']!r} is not a tensor's name")
        return NamedTensor(listed["v"])
    if kind == "per_rank":
        variants = []
        for each in listed["v"]:
            leaf = _leaf_of(each["v"], check)
            if isinstance(leaf, PerRank):
                raise ValueError("a value per rank contains values per rank")
            variants.append((tuple(map(int, each["ranks"])), leaf))
        if not variants:
            raise ValueError("a value per rank belongs to no rank")
        return PerRank(tuple(variants))
    check(listed)
    return FlatValue(listed)
