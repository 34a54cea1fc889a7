"""Filling of a state from a checkpoint: the places of saved tensors and values.

A state is walked twice. First everything is looked up and checked, and the tensors to fill are
listed. After they are filled, values are set and objects get their states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tilework.checkpoint.composing import MapNames, PieceOf, joined, mapped_name, piece
from tilework.checkpoint.describing import local_parts
from tilework.checkpoint.flat_state import FlatState, FlatValue, NamedTensor, PerRank, dotted
from tilework.checkpoint.flattening import (
    flatten,
    found_in,
    is_numpy_array,
    numpy_as_tensor,
    rebuild,
)
from tilework.checkpoint.format import Index, Path, SavedTensor
from tilework.checkpoint.name_patterns import NamePatterns
from tilework.checkpoint.stateful_objects import Containers, Places, has_state, is_lazy, unwrapped
from tilework.checkpoint.tensor_bytes import DTYPES
from tilework.checkpoint.values import decode_value, is_plain_sequence
from tilework.comm.per_call.internal import awaited, has_memory
from tilework.dtensor import DTensor
from tilework.dtensor.internal import is_torch_dtensor
from tilework.errors import CheckpointError
from tilework.tiled import TiledTensor

#: Gives the loaded value, once tensors are filled.
Finish = Callable[[], Any]


@dataclass(frozen=True, eq=False)
class Target:
    """A tensor to fill from a saved tensor, and the name in the state."""

    saved: SavedTensor
    tensor: Tensor
    where: str


@dataclass
class Filling:
    """The filling of a state from a checkpoint, on one rank."""

    index: Index
    saved: FlatState
    rank: int
    names: NamePatterns
    map_names: MapNames
    places: Places
    #: Looks up an optimizer, as :meth:`visit` does for other values.
    visit_optimizer: Callable[[Filling, Optimizer, Path], Finish]
    #: Raises unless these files are as long as the index says, before memory is allocated.
    check_files: Callable[[Iterable[str]], None]
    #: The tensors to fill, which :meth:`visit` lists; tied tensors once.
    targets: list[Target] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    #: Names of the checkpoint that have values for other ranks only.
    other_ranks: list[str] = field(default_factory=list)
    #: Paths of the checkpoint that the state asks for. A load reports all other leaves as unused.
    used: set[Path] = field(default_factory=set)
    #: The names of filled tensors; tied tensors with all their names.
    filled: list[str] = field(default_factory=list)
    _memory: dict[object, Tensor] = field(default_factory=dict)
    #: By name, tensors composed of others.
    made: dict[str, SavedTensor] = field(default_factory=dict)
    composed: list[tuple[Any, ...]] = field(default_factory=list)
    _paths: dict[str, Path] = field(init=False)

    def __post_init__(self) -> None:
        self._paths = {dotted(path): path for path in (*self.saved.containers, *self.saved.leaves)}

    # -- looking up --------------------------------------------------------------------------

    def mapped(self, name: str) -> str:
        mapped = mapped_name(name, self.map_names)
        return mapped if isinstance(mapped, str) else self.compose(mapped)

    def compose(self, of: Sequence[str] | PieceOf) -> str:
        """Compose a tensor of saved tensors, unless one of them is missing; return the name."""
        names = (of.name,) if isinstance(of, PieceOf) else tuple(of)
        leaves = [self.saved.leaves.get(self._paths.get(name, ())) for name in names]
        tensors = [self.tensor_named(leaf) for leaf in leaves if isinstance(leaf, NamedTensor)]
        if len(tensors) < len(names):
            return " + ".join(names)  # a name that is missing
        made = piece(tensors[0], of) if isinstance(of, PieceOf) else joined(tensors)
        self.used.update(self._paths[name] for name in names)
        if made.name not in self._paths:
            self.made[made.name] = made
            self.composed.append(names if not isinstance(of, PieceOf) else astuple(of))
            self.saved.leaves[(made.name,)] = NamedTensor(made.name)
            self._paths[made.name] = (made.name,)
        return made.name

    def compose_all(self, composed: Iterable[tuple[Any, ...]]) -> None:
        """Compose the tensors that other ranks have composed, given as in ``composed``."""
        used = set(self.used)
        for each in composed:
            is_piece = not all(isinstance(item, str) for item in each)
            self.compose(PieceOf(*each) if is_piece else each)
        self.used = used  # this rank has asked for none of the parts

    @property
    def unused(self) -> list[str]:
        names = (dotted(path) for path in self.saved.leaves if path not in self.used)
        return [name for name in names if name not in self.made]

    @property
    def tensors(self) -> dict[str, SavedTensor]:
        return {**self.index.tensors, **self.made}

    def find(self, path: Path) -> Path | None:
        """The path in the checkpoint for a path of the state; None if there is nothing."""
        name = dotted(path)
        mapped = self.mapped(name)
        if mapped == name and (path in self.saved.leaves or path in self.saved.containers):
            return path
        return self._paths.get(mapped)

    def leaf(self, path: Path) -> FlatValue | NamedTensor | None:
        """This rank's leaf at a path of the checkpoint, which counts as used; None without any."""
        leaf = self.saved.leaves.get(path)
        self.used.add(path)
        if isinstance(leaf, PerRank):
            own = leaf.of(self.rank)
            if own is None:
                self.other_ranks.append(dotted(path))
            return own
        return leaf

    def tensor_named(self, leaf: NamedTensor) -> SavedTensor:
        return self.made.get(leaf.name) or self.index.tensors[leaf.name]

    def paths_under(self, root: Path) -> list[Path]:
        """The paths of leaves at a saved path and below."""
        return self._leaves_under.get(root, [])

    def containers_under(self, root: Path) -> dict[Path, str]:
        """The kinds of containers at a saved path and below."""
        return {path: self.saved.containers[path] for path in self._containers_under.get(root, ())}

    @cached_property
    def _leaves_under(self) -> dict[Path, list[Path]]:
        return _by_beginning(self.saved.leaves)

    @cached_property
    def _containers_under(self) -> dict[Path, list[Path]]:
        return _by_beginning(self.saved.containers)

    def is_of_others(self, root: Path) -> bool:
        """True if leaves below a saved path are of other ranks, and none is of this rank alone."""
        leaves = [self.saved.leaves[path] for path in self.paths_under(root)]
        variants = [leaf for leaf in leaves if isinstance(leaf, PerRank)]
        return bool(variants) and all(leaf.of(self.rank) is None for leaf in variants)

    # -- walking -----------------------------------------------------------------------------

    def visit(self, value: Any, path: Path) -> Finish:
        """Look up everything in ``value``, list the tensors to fill, and return how to finish."""
        if isinstance(value, nn.Module):
            return self._visit_module(value, path)
        if isinstance(value, Optimizer):
            return self.visit_optimizer(self, value, path)
        if isinstance(value, torch.Generator):
            return self._visit_generator(value, path)
        if has_state(value):
            return self._visit_object(value, path)
        return self._visit_plain(value, path)

    def _visit_plain(self, value: Any, path: Path) -> Finish:
        if isinstance(value, Tensor):
            return self._visit_tensor(value, path)
        if isinstance(value, Mapping):
            return self._visit_dict(value, path)
        if isinstance(value, list | tuple) and not is_plain_sequence(value):
            return self._visit_sequence(value, path)
        if is_numpy_array(value):
            return self._visit_array(value, path)
        return self._visit_value(value, path)

    def _visit_tensor(self, value: Tensor, path: Path) -> Finish:
        name = dotted(path)
        if not self.names.match(name):
            return lambda: value
        found = self.find(path)
        leaf = self.leaf(found) if found is not None and found in self.saved.leaves else None
        variants = None if found is None else self.saved.leaves.get(found)
        if isinstance(variants, PerRank):
            _check_one_copy(value, variants, name)
        if leaf is None:
            if not isinstance(variants, PerRank):
                self.missing.append(name)
            return lambda: value
        if isinstance(leaf, FlatValue):
            number = decode_value(leaf.json)
            if value.dim() or not isinstance(number, bool | int | float | complex):
                raise CheckpointError(
                    f"{name} is a tensor of shape {list(value.shape)}, and the checkpoint has the "
                    f"number {number!r} there: only a tensor without dims can take a number. Leave "
                    f"it out (names), or load into a plain number",
                    tensor=name,
                )
            return lambda: _filled(value, number)
        self.fill(value, self.tensor_named(leaf), name)
        return lambda: value

    def fill(self, tensor: Tensor, saved: SavedTensor, where: str) -> None:
        tensor = DTensor.from_torch(tensor) if is_torch_dtensor(tensor) else awaited(tensor)
        problem = unfillable(tensor)
        if problem:
            raise CheckpointError(f"{where} cannot be filled: it is {problem}", tensor=saved.name)
        if tuple(tensor.shape) != saved.shape:
            raise CheckpointError(
                f"{where} has shape {list(tensor.shape)}, and {saved.name!r} in the checkpoint has "
                f"{list(saved.shape)}: load it by other names (map_names), or leave it out (names)",
                tensor=saved.name,
            )
        if not self._is_filled(tensor, saved):
            self.targets.append(Target(saved, tensor, where))
        self.filled.append(where)

    def _is_filled(self, tensor: Tensor, saved: SavedTensor) -> bool:
        tiles = local_parts(tensor)
        memory = tuple((tile.data_ptr(), tile.shape, tile.stride(), tile.dtype) for tile in tiles)
        known = self._memory.setdefault((saved.parts, memory), tensor)
        return known is not tensor and bool(saved.parts) and any(tile.numel() for tile in tiles)

    def _visit_dict(self, value: Mapping[Any, Any], path: Path) -> Finish:
        found = self.find(path)
        if not value and found is not None and self.names.match(dotted(path)):
            fresh = Fresh(self, found)
            return lambda: _updated(value, fresh()) if fresh.found else value
        finishes = {key: self.visit(each, (*path, key)) for key, each in value.items()}

        def finish() -> Mapping[Any, Any]:
            filled = {key: each() for key, each in finishes.items()}
            changed = {key: new for key, new in filled.items() if new is not value[key]}
            result: Mapping[Any, Any] = _updated(value, changed)
            return result

        return finish

    def _visit_sequence(self, value: list[Any] | tuple[Any, ...], path: Path) -> Finish:
        found = self.find(path)
        if not value and found is not None and self.names.match(dotted(path)):
            fresh = Fresh(self, found)
            if self.is_of_others(found):
                return lambda: value
            return lambda: _replaced(value, fresh())
        finishes = [self.visit(each, (*path, number)) for number, each in enumerate(value)]
        return lambda: _replaced(value, [finish() for finish in finishes])

    def _visit_value(self, value: Any, path: Path) -> Finish:
        name = dotted(path)
        if not self.names.match(name):
            return lambda: value
        found = self.find(path)
        if found is None:
            self.missing.append(name)
            return lambda: value
        fresh = Fresh(self, found)
        return lambda: _replaced(value, fresh()) if fresh.found else value

    def _visit_array(self, value: Any, path: Path) -> Finish:
        found = self.find(path)
        if found is not None and self.saved.containers.get(found) == "numpy":
            path = (*path, 0)
        elements = numpy_as_tensor(value, dotted(path))
        finish_elements = self._visit_tensor(elements, path)

        def finish() -> Any:
            array: Any = finish_elements().numpy()
            if not value.flags.writeable:
                return array
            value[...] = array  # the array itself, unless torch cannot share such memory
            return value

        return finish

    def _visit_module(self, given: nn.Module, path: Path) -> Finish:
        module = unwrapped(given)
        contents = module.state_dict()
        finish = self._visit_dict(contents, path) if contents else dict
        in_place = is_in_module(module, contents)

        def give() -> Any:
            filled: Any = finish()
            if not in_place:
                module.load_state_dict(filled, strict=False)
            return given  # with the wrapper: data parallelism stays

        return give

    def _visit_generator(self, value: torch.Generator, path: Path) -> Finish:
        state = value.get_state()
        before = len(self.targets)
        self._visit_tensor(state, path)
        if len(self.targets) == before:
            return lambda: value
        return lambda: value.set_state(state)

    def _visit_object(self, value: Any, path: Path) -> Finish:
        """Look up an object with ``load_state_dict``, if names in it are asked for."""
        name, found = dotted(path), self.find(path)
        if not self.names.match(name) and not (
            found is not None and any(self.names.match(dotted(p)) for p in self.paths_under(found))
        ):
            return lambda: value
        if found is None:
            self.missing.append(name)
            return lambda: value
        contents = value.state_dict()
        own = dict(found_in(contents, Tensor))

        def memory(path: Path, saved: SavedTensor) -> Tensor | None:
            tensor = own.get(path)
            return tensor if tensor is not None and tuple(tensor.shape) == saved.shape else None

        fresh = Fresh(self, found, memory)
        if self.is_of_others(found):
            fresh.keep(flatten(contents, Containers(contents)))

        def give() -> Any:
            state = fresh()
            if fresh.found:
                value.load_state_dict(state)
            return value

        return give


def _by_beginning(paths: Iterable[Path]) -> dict[Path, list[Path]]:
    found: dict[Path, list[Path]] = {}
    for path in paths:
        for length in range(len(path) + 1):
            found.setdefault(path[:length], []).append(path)
    return found


#: Gives memory for a saved tensor at a path within a state, or None.
Memory = Callable[[Path, SavedTensor], Tensor | None]


class Fresh:
    """Everything saved below a path, without a place in the state: in new memory, unless ``memory``
    gives any. Once tensors are filled, a call builds and returns it.
    """

    def __init__(
        self, filling: Filling, root: Path, memory: Memory = lambda path, saved: None
    ) -> None:
        self._root = root
        self._flat = FlatState(containers=filling.containers_under(root))
        self._paths = filling.paths_under(root)
        for path in self._paths:
            leaf: Any = filling.leaf(path)
            if isinstance(leaf, NamedTensor):
                saved = filling.tensor_named(leaf)
                leaf = memory(path[len(root) :], saved)
                if leaf is None:
                    filling.check_files({part.file for part in saved.parts})
                    leaf = torch.empty(saved.shape, dtype=DTYPES[saved.dtype])
                filling.fill(leaf, saved, dotted(path))
            if leaf is not None:
                self._flat.leaves[path] = leaf
        self.has_leaves = bool(self._flat.leaves)
        #: False if everything belongs to other ranks.
        self.found = self.has_leaves or not self._paths

    def keep(self, own: FlatState) -> None:
        """Take the leaves of other ranks from this rank's state, if it has all of them."""
        lacking = [path for path in self._paths if path not in self._flat.leaves]
        kept = {path: own.leaves.get(path[len(self._root) :]) for path in lacking}
        self.found = None not in kept.values()
        self._flat.leaves.update(kept)

    def __call__(self) -> Any:
        return rebuild(self._flat, self._root)


def _filled(tensor: Tensor, number: Any) -> Tensor:
    tensor.detach().fill_(number)
    return tensor


def _updated(old: Mapping[Any, Any], new: Any) -> Any:
    if not isinstance(new, dict):
        return new
    if isinstance(old, MutableMapping):
        old.update(new)
        return old
    return {**old, **new} if new else old  # a view, for example, whose tensors are filled


def unfillable(tensor: Tensor) -> str:
    """The reason why a tensor's elements cannot be written in place; empty if they can."""
    if isinstance(tensor, TiledTensor):
        if tensor.is_snapshot:
            return "a view that had to move elements, a copy: load into the base"
        return next(filter(None, map(unfillable, tensor.local_tiles())), "")
    if is_lazy(tensor):
        return "not initialised: give the module an input, or a shape, first"
    if tensor.is_nested or tensor.layout is not torch.strided:
        return f"of layout {tensor.layout}, not dense: load into dense tensors"
    if tensor.is_meta:
        return "on the device 'meta', without memory: module.to_empty(device='cpu') first"
    if not has_memory(tensor):
        return f"a {type(tensor).__name__} without memory: load into the tensors that it holds"
    if _repeats(tensor):
        return "expanded, so that elements share memory: load into a clone() of it"
    return ""


def _repeats(tensor: Tensor) -> bool:
    """True if some dim of size above 1 has stride 0: the elements share memory."""
    return tensor.numel() > 0 and any(
        stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _replaced(old: Any, new: Any) -> Any:
    if isinstance(old, list) and isinstance(new, list | tuple):
        old[:] = new
        return old
    if hasattr(old, "_fields") and isinstance(new, list | tuple):
        return type(old)(*new)
    return tuple(new) if isinstance(old, tuple) and isinstance(new, list) else new


def is_in_module(module: nn.Module, contents: Mapping[str, Any]) -> bool:
    """True if filling the tensors of a state dict in place is equivalent to loading it."""
    for inner in module.modules():
        kind = type(inner)
        custom = (
            kind._load_from_state_dict is not nn.Module._load_from_state_dict
            or kind.load_state_dict is not nn.Module.load_state_dict
        )
        if custom and not kind.__module__.startswith("torch.nn."):
            return False
        if inner._load_state_dict_post_hooks:
            return False
    return _addresses(contents.values()) <= _addresses(_held(module)) and all(
        isinstance(value, Tensor) for value in contents.values()
    )


def _held(module: nn.Module) -> Iterable[Any]:
    for inner in module.modules():
        yield from inner._parameters.values()
        yield from inner._buffers.values()
        yield from vars(inner).values()


def _addresses(values: Iterable[Any]) -> set[int]:
    tensors = (value for value in values if isinstance(value, Tensor))
    return {part.data_ptr() for tensor in tensors for part in local_parts(tensor)}


def _check_one_copy(tensor: Tensor, saved: PerRank, where: str) -> None:
    """Raise if ranks were to fill their parts of a DTensor from different saved tensors."""
    if is_torch_dtensor(tensor):
        tensor = DTensor.from_torch(tensor)
    if not isinstance(tensor, DTensor):
        return
    ranks = tensor.device_mesh.spec.ranks
    first = saved.of(ranks[0])
    other = next((rank for rank in ranks if saved.of(rank) is not first), None)
    if other is not None:
        raise CheckpointError(
            f"{where} lies on ranks {list(ranks)}, and the checkpoint has a separate tensor of "
            f"that name for each rank: ranks {ranks[0]} and {other} would fill their parts from "
            f"different tensors. Load it into plain tensors, or distribute read(path)[...][rank]",
            tensor=where,
        )
