"""Filling of optimizers: states go to the parameters of their names, settings to their groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tilework.checkpoint.filling import Filling, Finish
from tilework.checkpoint.flat_state import FlatState, NamedTensor, Value, dotted, rebuild
from tilework.checkpoint.format import Path, SavedTensor
from tilework.checkpoint.objects import is_split, parameters_of
from tilework.comm.world import get_rank
from tilework.dtensor import DTensor
from tilework.dtensor.tensor import wrap
from tilework.sharded import ShardedOptimizer, ShardedTensor

Named = list[tuple[Any, Tensor]]


def visit_optimizer(filling: Filling, optimizer: Optimizer, path: Path) -> Finish:
    """Look up the states of an optimizer's parameters, and its groups' settings.

    A parameter that had no state when it was saved gets none. One that was not saved is missing.
    """
    if not _is_asked(filling, path):
        return lambda: optimizer
    root = filling.find(path)
    if root is None or (*root, "param_groups") not in filling.saved.containers:
        filling.missing.append(dotted(path))
        return lambda: optimizer
    groups = parameters_of(optimizer, filling.parameter_names)
    saved_groups = _saved_groups(filling, root)
    saved_name = _matching(filling, path, groups, saved_groups)
    states: dict[int, FlatState] = {}
    listed = [pair for group in groups for pair in group]
    for number, (name, parameter) in enumerate(listed):
        saved = saved_name.get(name)
        if saved is None:
            filling.missing.append(dotted((*path, "state", name)))
        elif _is_here(optimizer, parameter):
            state = _state_of(filling, (*root, "state", saved), parameter)
            if state.leaves:
                states[number] = state
    _note_rest(filling, root)
    options = [_options(group, saved_groups, saved_name) for group in groups]
    return lambda: _give(optimizer, groups, states, options)


def _is_asked(filling: Filling, path: Path) -> bool:
    name = dotted(path)
    return filling.is_asked(name) or filling.is_asked(f"{name}.state")


def _saved_groups(filling: Filling, root: Path) -> list[dict[str, Any]]:
    fresh = filling.fresh((*root, "param_groups"))
    groups = fresh()
    return [dict(group) for group in groups] if isinstance(groups, list) else []


def _matching(
    filling: Filling, path: Path, groups: list[Named], saved_groups: list[dict[str, Any]]
) -> dict[Any, Any]:
    """The checkpoint's name of each parameter; by position where one side has no names."""
    saved = [name for group in saved_groups for name in group["params"]]
    own = [name for group in groups for name, _ in group]
    numbered = {type(name) for name in saved} == {int}, {type(name) for name in own} == {int}
    if any(numbered) and len(saved) == len(own):
        return dict(zip(own, saved, strict=True))
    known = set(saved)
    return {
        name: other
        for name in own
        if (other := _saved_name(filling, path, name, known)) is not None
    }


def _saved_name(filling: Filling, path: Path, name: Any, known: set[Any]) -> Any:
    """The checkpoint's name of a parameter, as the caller maps names of its module."""
    if filling.map_names is not None and isinstance(name, str):
        full = dotted((*path, "state", name))
        mapped = filling.mapped(full)
        for start in _starts(filling, path):
            if mapped.removeprefix(start) in known:
                return mapped.removeprefix(start)
        for prefix in ("", *(f"{each}." for each in _module_prefixes(filling))):
            candidate = filling.mapped(f"{prefix}{name}")
            for start in (prefix, ""):
                short = candidate.removeprefix(start)
                if short in known and short != name:
                    return short
    return name if name in known else None


def _starts(filling: Filling, path: Path) -> list[str]:
    root = filling.find(path)
    roots = [path] if root is None else [path, root]
    return [dotted((*each, "state")) + "." for each in roots]


def _module_prefixes(filling: Filling) -> list[str]:
    return sorted({target.where.split(".")[0] for target in filling.targets})


def _is_here(optimizer: Optimizer, parameter: Tensor) -> bool:
    """True if this rank is to have the states of a parameter."""
    return not is_split(optimizer) or optimizer.owner_of(parameter) == get_rank()  # type: ignore[attr-defined]


def _state_of(filling: Filling, root: Path, parameter: Tensor) -> FlatState:
    """The state of one parameter, with tensors to fill."""
    state = FlatState(
        containers={
            path[len(root) :]: kind for path, kind in _containers_under(filling, root).items()
        }
    )
    for path in filling.paths_under(root):
        leaf = filling.leaf(path)
        short = path[len(root) :]
        if isinstance(leaf, NamedTensor):
            saved = filling.tensor_named(leaf)
            tensor = _empty_state(str(short[-1]), parameter, saved)
            filling.fill(tensor, saved, dotted(path))
            state.leaves[short] = tensor
        elif isinstance(leaf, Value):
            state.leaves[short] = leaf
    return state


def _containers_under(filling: Filling, root: Path) -> dict[Path, str]:
    found: dict[Path, str] = {}
    for path in (*filling.paths_under(root), (*root, None)):
        for length in range(len(root), len(path)):
            kind = filling.saved.containers.get(path[:length])
            if kind is not None:
                found[path[:length]] = kind
    return found


def _empty_state(name: str, parameter: Tensor, saved: SavedTensor) -> Tensor:
    """Memory for a state: laid out as the parameter if it has an element for each of its."""
    dtype = saved.torch_dtype
    if name == "step" or saved.shape != tuple(parameter.shape):
        return torch.empty(saved.shape, dtype=dtype)
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            return wrap(
                torch.empty_like(parameter._local_tensor.detach(), dtype=dtype), parameter._spec
            )
        if isinstance(parameter, ShardedTensor):
            tiles = [torch.empty_like(t.detach(), dtype=dtype) for t in parameter.local_tiles()]
            return parameter.like(tiles, dtype=dtype, requires_grad=False)
        return torch.empty_like(parameter.detach(), dtype=dtype)


def _note_rest(filling: Filling, root: Path) -> None:
    """Note as used what an optimizer has besides: it is made anew."""
    for path in filling.paths_under(root):
        if path[len(root)] not in ("state", "param_groups"):
            filling.used.add(path)


def _options(
    group: Named, saved_groups: list[dict[str, Any]], saved_name: Mapping[Any, Any]
) -> dict[str, Any]:
    """The settings of the saved group that has the first parameter of this one that was saved."""
    names = [saved_name[name] for name, _ in group if name in saved_name]
    for saved in saved_groups:
        if names and names[0] in saved["params"]:
            return {key: value for key, value in saved.items() if key != "params"}
    return {}


def _give(
    optimizer: Optimizer,
    groups: list[Named],
    states: Mapping[int, FlatState],
    options: list[dict[str, Any]],
) -> Optimizer:
    filled = {number: rebuild(state) for number, state in states.items()}
    listed = [pair for group in groups for pair in group]
    if isinstance(optimizer, ShardedOptimizer):
        saved = {name: filled.get(number, {}) for number, (name, _) in enumerate(listed)}
        names = [
            {**_own_options(own), **given, "params": [name for name, _ in group]}
            for own, given, group in zip(optimizer.param_groups, options, groups, strict=True)
        ]
        optimizer.load_state_dict({"state": saved, "param_groups": names})
        return optimizer
    first, packed = 0, []
    for own, given, group in zip(optimizer.param_groups, options, groups, strict=True):
        numbers = list(range(first, first + len(group)))
        first += len(group)
        packed.append({**_own_options(own), **given, "params": numbers})
    optimizer.load_state_dict({"state": filled, "param_groups": packed})
    if not is_split(optimizer):
        _restore_dtypes(optimizer, listed, filled)
    return optimizer


def _own_options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _restore_dtypes(
    optimizer: Optimizer, listed: Named, filled: Mapping[int, Mapping[str, Any]]
) -> None:
    """Undo torch's casts of states to their parameters' dtypes: the saved bits count."""
    for number, state in filled.items():
        own = optimizer.state[listed[number][1]]
        for key, value in state.items():
            if isinstance(value, Tensor) and own[key].dtype is not value.dtype:
                own[key] = value
