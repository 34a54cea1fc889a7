"""Filling of optimizers: states go to parameters by name, settings to groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tilework.checkpoint.filling import Filling, Finish, Fresh
from tilework.checkpoint.flat_state import PerRank, dotted
from tilework.checkpoint.format import Path, SavedTensor
from tilework.checkpoint.stateful_objects import (
    Place,
    is_split,
    one_to_one,
    parameters_of,
    possible_names,
)
from tilework.checkpoint.tensor_bytes import DTYPES
from tilework.comm.world import get_rank
from tilework.dtensor import DTensor
from tilework.dtensor.internal import layout_of, local_tensor_of, wrap
from tilework.sharded import ShardedOptimizer, ShardedTensor
from tilework.sharded.internal import local_tensors

Named = list[tuple[Any, Tensor]]


def visit_optimizer(filling: Filling, optimizer: Optimizer, path: Path) -> Finish:
    """Look up the states of an optimizer's parameters, and the groups' settings.

    A parameter that was not saved, or by other ranks alone, keeps the state that it has.
    """
    name = dotted(path)
    if not (filling.names.match(name) or filling.names.match(f"{name}.state")):
        return lambda: optimizer
    root = filling.find(path)
    if root is None or (*root, "param_groups") not in filling.saved.containers:
        filling.missing.append(dotted(path))
        return lambda: optimizer
    groups = parameters_of(optimizer, filling.places)
    saved_groups = _saved_groups(filling, root)
    saved_name = _matching(filling, path, groups, saved_groups)
    states: dict[int, Fresh] = {}
    kept: list[int] = []
    listed = [pair for group in groups for pair in group]
    for number, (name, parameter) in enumerate(listed):
        saved = saved_name.get(name)
        if saved is None:
            filling.missing.append(dotted((*path, "state", name)))
            kept.append(number)
        elif _is_here(optimizer, parameter):
            place = (*root, "state", saved)
            state = Fresh(filling, place, partial(_empty_state, parameter))
            if filling.is_of_others(place):
                kept.append(number)
            elif state.has_leaves:
                states[number] = state
    for rest in filling.paths_under(root):
        if rest[len(root)] not in ("state", "param_groups"):
            filling.used.add(rest)  # the optimizer remakes other entries
    options = [_options(group, saved_groups, saved_name) for group in groups]
    return lambda: _give(optimizer, groups, states, options, kept)


def _saved_groups(filling: Filling, root: Path) -> list[dict[str, Any]]:
    """The saved groups: this rank's, then those of other ranks that have other parameters."""
    path = (*root, "param_groups")
    leaves = [filling.saved.leaves[each] for each in filling.paths_under(path)]
    others = {
        ranks[0] for leaf in leaves if isinstance(leaf, PerRank) for ranks, _ in leaf.variants
    }
    groups: list[dict[str, Any]] = []
    known: set[Any] = set()
    for rank in (filling.rank, *sorted(others - {filling.rank})):
        now = replace(filling, rank=rank, other_ranks=[])
        made = Fresh(now, path)()
        new = [dict(group) for group in made] if isinstance(made, list) else []
        for each in (x for x in new if "params" in x):
            names = [name for name in each["params"] if name not in known]
            is_new = len(names) == len(each["params"])  # numbers of other ranks are not names
            if is_new or (names and all(isinstance(name, str) for name in names)):
                groups.append({**each, "params": names})
        known.update(*(group["params"] for group in groups))
    return groups


def _matching(
    filling: Filling, path: Path, groups: list[Named], saved_groups: list[dict[str, Any]]
) -> dict[Any, Any]:
    """From the optimizer's to the checkpoint's names; without names, by position."""
    saved = [name for group in saved_groups for name in group["params"]]
    listed = [pair for group in groups for pair in group]
    own = [name for name, _ in listed]
    numbered = {type(name) for name in saved} == {int}, {type(name) for name in own} == {int}
    times = Counter(saved)
    known = {name for name in saved if times[name] == 1}
    if any(numbered) and len(known) == len(saved) == len(own):
        return dict(zip(own, saved, strict=True))
    if filling.map_names is None and known == set(own):
        return {name: name for name in own}
    return _Candidates(filling, path, known).matching(listed)


class _Candidates:
    """The names that a checkpoint may have for an optimizer's parameters."""

    def __init__(self, filling: Filling, path: Path, known: set[Any]) -> None:
        self._filling, self._known = filling, known
        root = filling.find(path)
        self._path = (*path, "state")
        self._starts = [dotted((*each, "state")) + "." for each in (path, root) if each is not None]

    def matching(self, listed: Named) -> dict[Any, Any]:
        found, possible = {}, {}
        places = [self._filling.places.get(id(parameter), ()) for _, parameter in listed]
        saved_places = {
            (path, own): self._filling.find((*path, own)) for path, own in chain(*places)
        }
        saved_modules = {path for (path, _), saved in saved_places.items() if saved is not None}
        for (name, _), all_places in zip(listed, places, strict=True):
            candidates = {name: None} if self._mapped(name) == name else {}
            for place in all_places:
                # A module that the checkpoint lacks must not claim names of other modules.
                if place[0] in saved_modules or not saved_modules:
                    candidates.update(self._of_place(place, saved_places[place]))
            explicit = self._explicit((name, *candidates))
            if explicit is not None:
                found[name] = explicit
            else:
                possible[name] = [each for each in candidates if each in self._known]
        taken = set(found.values())
        free = {
            name: [each for each in candidates if each not in taken]
            for name, candidates in possible.items()
        }
        return {**found, **one_to_one(free)}

    def _mapped(self, name: Any) -> Any:
        return self._filling.mapped(name) if isinstance(name, str) else name

    def _explicit(self, names: Iterable[Any]) -> Any:
        """The checkpoint's name that ``map_names`` gives for one of these names; None without."""
        for name in names if self._filling.map_names is not None else ():
            full = dotted((*self._path, name))
            mapped = self._filling.mapped(full)
            for start in self._starts:
                if mapped != full and mapped.removeprefix(start) in self._known:
                    return mapped.removeprefix(start)
        return None

    def _of_place(self, place: Place, saved: Path | None) -> dict[Any, None]:
        path, own = place
        if saved is not None:
            path, own = saved[:-1], str(saved[-1])
        else:
            start = f"{dotted(path)}."
            full = self._mapped(f"{start}{own}")
            own = full.removeprefix(start) if full != f"{start}{own}" else self._mapped(own)
        return dict.fromkeys(possible_names(path, own))


def _is_here(optimizer: Optimizer, parameter: Tensor) -> bool:
    return not is_split(optimizer) or optimizer.owner_of(parameter) == get_rank()  # type: ignore[attr-defined]


def _empty_state(parameter: Tensor, path: Path, saved: SavedTensor) -> Tensor:
    """Memory for a tensor of a state: laid out like the parameter if the shape is equal."""
    dtype = DTYPES[saved.dtype]
    if str(path[-1]) == "step" or saved.shape != tuple(parameter.shape):
        return torch.empty(saved.shape, dtype=dtype)
    with torch.no_grad():
        if isinstance(parameter, DTensor):
            return wrap(
                torch.empty_like(local_tensor_of(parameter).detach(), dtype=dtype),
                layout_of(parameter),
            )
        if isinstance(parameter, ShardedTensor):
            tiles = [torch.empty_like(t.detach(), dtype=dtype) for t in parameter.local_tiles()]
            return parameter.like(tiles, dtype=dtype, requires_grad=False)
        return torch.empty_like(parameter.detach(), dtype=dtype)


def _options(
    group: Named, saved_groups: list[dict[str, Any]], saved_name: Mapping[Any, Any]
) -> dict[str, Any]:
    """The settings of the saved group that has this group's first parameter; empty if none."""
    names = [saved_name[name] for name, _ in group if name in saved_name]
    for saved in saved_groups:
        if names and names[0] in saved["params"]:
            return {key: value for key, value in saved.items() if key != "params"}
    return {}


def _give(
    optimizer: Optimizer,
    groups: list[Named],
    states: Mapping[int, Fresh],
    options: list[dict[str, Any]],
    kept: Iterable[int],
) -> Optimizer:
    filled = {number: state() for number, state in states.items()}
    listed = [pair for group in groups for pair in group]
    own_states = _states_here(optimizer, [listed[number][1] for number in kept])
    load_states(optimizer, groups, filled, options)
    if own_states:
        _holder(optimizer).state.update(own_states)
    return optimizer


def _holder(optimizer: Any) -> Any:
    """The optimizer that has this rank's states; None if the rank has no parameter."""
    return optimizer.optim if is_split(optimizer) else optimizer


def _states_here(optimizer: Optimizer, parameters: Iterable[Tensor]) -> dict[Tensor, Any]:
    holder = _holder(optimizer)
    is_sharded = isinstance(optimizer, ShardedOptimizer)
    tensors = [t for p in parameters for t in (local_tensors(p) if is_sharded else [p])]
    return {t: holder.state[t] for t in tensors if holder is not None and t in holder.state}


def load_states(
    optimizer: Optimizer,
    groups: list[Named],
    filled: Mapping[int, dict[str, Any]],
    options: list[dict[str, Any]],
) -> None:
    """Give an optimizer the states of parameters, by number, and the settings of groups."""
    listed = [pair for group in groups for pair in group]
    if isinstance(optimizer, ShardedOptimizer):
        saved = {name: filled.get(number, {}) for number, (name, _) in enumerate(listed)}
        names = [
            {**own, **given, "params": [name for name, _ in group]}
            for own, given, group in zip(optimizer.param_groups, options, groups, strict=True)
        ]
        optimizer.load_state_dict({"state": saved, "param_groups": names})
        return
    first, packed = 0, []
    for own, given, group in zip(optimizer.param_groups, options, groups, strict=True):
        numbers = list(range(first, first + len(group)))
        first += len(group)
        packed.append({**own, **given, "params": numbers})
    optimizer.load_state_dict({"state": filled, "param_groups": packed})
    if not is_split(optimizer):
        _restore_dtypes(optimizer, listed, filled)


def _restore_dtypes(
    optimizer: Optimizer, listed: Named, filled: Mapping[int, Mapping[str, Any]]
) -> None:
    """Undo torch's casts of states to their parameters' dtypes: the saved bits must stay."""
    for number, state in filled.items():
        own = optimizer.state[listed[number][1]]
        for key, value in state.items():
            if isinstance(value, Tensor) and own[key].dtype is not value.dtype:
                own[key] = value
