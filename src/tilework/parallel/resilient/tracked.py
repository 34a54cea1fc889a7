"""The state of a training loop: its tensors by name with who holds them, and its other values."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tilework.comm.world import current_world, get_rank, get_world_size
from tilework.dtensor import DTensor
from tilework.dtensor.tensor import wrap
from tilework.layout import Box, Tile, Tiling
from tilework.parallel.resilient.catalog import Described, described
from tilework.parallel.zero_redundancy import ZeroRedundancyOptimizer
from tilework.tiled.tensor import TiledTensor

State = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Tracked:
    """A tensor of the state, looked up anew each time: optimizers may replace theirs."""

    name: str
    get: Callable[[], Tensor]
    tiling: Tiling

    def locals(self) -> list[Tensor]:
        """This rank's tensors, one for each of its tiles."""
        tensor = self.get()
        if isinstance(tensor, TiledTensor):
            return [tile.detach() for tile in tensor.local_tiles()]
        return [tensor.detach()] if self.tiling.of(get_rank()) else []

    def described(self) -> Described:
        """It as plain data."""
        return described(self.name, self.get().dtype, self.tiling)


def tracked_tensors(state: State) -> list[Tracked]:
    """Every tensor of the state that this rank knows of. Local.

    Plain parameters and optimizer states are what all ranks have alike; of a plain buffer the first
    rank's counts. A tensor that is in several places is listed once.

    Raises:
        TypeError: The state has something that cannot be saved and restored.
    """
    found: list[Tracked] = []
    seen: set[int] = set()
    for name, value in state.items():
        for each in _tensors_of(name, value, state):
            tensor = each.get()
            if id(tensor) not in seen:
                seen.add(id(tensor))
                found.append(each)
    return found


def _tensors_of(name: str, value: Any, state: State) -> Iterator[Tracked]:
    if isinstance(value, nn.Module):
        for key, tensor in value.state_dict(keep_vars=True).items():
            if isinstance(tensor, Tensor):
                everyone = isinstance(tensor, nn.Parameter)
                yield _tracked(f"{name}/{key}", tensor, None if everyone else (0,))
    elif isinstance(value, Optimizer):
        yield from _optimizer_tensors(name, value, state)
    elif isinstance(value, Tensor):
        yield _tracked(name, value, None)
    elif not _has_state(value):
        raise TypeError(
            f"state[{name!r}] is of type {type(value).__name__}: a state has modules, optimizers, "
            f"tensors, and objects with state_dict() and load_state_dict()"
        )


def _tracked(name: str, tensor: Tensor, owners: tuple[int, ...] | None) -> Tracked:
    return Tracked(name, lambda: tensor, _tiling_of(tensor, owners))


def _tiling_of(tensor: Tensor, owners: tuple[int, ...] | None) -> Tiling:
    if isinstance(tensor, TiledTensor):
        return tensor.tiling
    shape = tuple(tensor.shape)
    whole = Box((0,) * len(shape), shape)
    return Tiling.of_tiles(shape, [Tile(whole, owners or tuple(range(get_world_size())))])


def _optimizer_tensors(name: str, optimizer: Optimizer, state: State) -> Iterator[Tracked]:
    names = parameter_names(state, optimizer)
    inner = _inner(optimizer)
    if inner is None:
        return
    for parameter, values in inner.state.items():
        owners = None
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            owners = (optimizer.owner_of(cast("nn.Parameter", parameter)),)
        for key, value in values.items():
            if isinstance(value, Tensor):
                tiling = _tiling_of(value, owners)
                full = f"{name}/{names[parameter]}/{key}"
                yield Tracked(full, lambda values=values, key=key: values[key], tiling)  # type: ignore[misc]


def _inner(optimizer: Optimizer) -> Optimizer | None:
    """The optimizer that has the states; None where this rank has no part of them."""
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer


def parameter_names(state: State, optimizer: Optimizer) -> dict[Tensor, str]:
    """A name for each parameter of an optimizer: that of its module, or its number."""
    known: dict[int, str] = {}
    for name, value in state.items():
        if isinstance(value, nn.Module):
            for key, tensor in value.state_dict(keep_vars=True).items():
                known.setdefault(id(tensor), f"{name}/{key}")
    names = {}
    for number, parameter in enumerate(p for g in optimizer.param_groups for p in g["params"]):
        names[parameter] = known.get(id(parameter), f"#{number}")
    return names


def make_optimizer_states(
    state: State, entries: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> None:
    """Make the optimizers' states that a snapshot has, to be filled. Local.

    Args:
        state: The state, whose optimizers may not have stepped yet.
        entries: Shape and dtype of the snapshot's tensors, by name.
    """
    for name, optimizer in state.items():
        if not isinstance(optimizer, Optimizer):
            continue
        inner = _inner(optimizer)
        if inner is None:
            continue
        mine = [
            (p, n) for p, n in parameter_names(state, optimizer).items() if _is_mine(optimizer, p)
        ]
        keys: dict[str, list[str]] = {}
        for entry in entries:
            if entry.startswith(f"{name}/"):
                path, _, key = entry.rpartition("/")
                keys.setdefault(path, []).append(key)
        for parameter, parameter_name in mine:
            path = f"{name}/{parameter_name}"
            inner.state[parameter] = {
                key: _empty_state(parameter, key, *entries[f"{path}/{key}"])
                for key in keys.get(path, ())
            }
            if not inner.state[parameter]:
                del inner.state[parameter]


def _is_mine(optimizer: Optimizer, parameter: Tensor) -> bool:
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        return True
    return optimizer.owner_of(cast("nn.Parameter", parameter)) == get_rank()


def _empty_state(parameter: Tensor, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if key != "step" and shape == tuple(parameter.shape):
        if isinstance(parameter, DTensor):
            local = torch.zeros_like(parameter._local_tensor.detach(), dtype=dtype)
            return wrap(local, parameter._spec)
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    return torch.zeros(shape, dtype=dtype)


def _has_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def states_made(state: State) -> int:
    """The number of values that optimizers keep for parameters: it grows as they make them."""
    inner = [_inner(value) for value in state.values() if isinstance(value, Optimizer)]
    return sum(len(values) for each in inner if each is not None for values in each.state.values())


# -- what is no tensor ---------------------------------------------------------------------------


def other_values(state: State) -> dict[str, Any]:
    """Plain data of this rank's: settings of optimizers, objects' states, random generators."""
    values: dict[str, Any] = {"random": _random_state()}
    for name, value in state.items():
        if isinstance(value, Optimizer):
            values[name] = [
                {key: setting for key, setting in group.items() if key != "params"}
                for group in value.param_groups
            ]
        elif not isinstance(value, nn.Module | Tensor):
            values[name] = value.state_dict()
    return values


def set_other_values(state: State, values: Mapping[str, Any], with_random: bool) -> None:
    """Set what :func:`other_values` gave, on a state that may be built for other ranks. Local."""
    for name, value in state.items():
        if name not in values:
            continue
        if isinstance(value, Optimizer):
            for group, settings in zip(value.param_groups, values[name], strict=True):
                group.update(settings)
        elif not isinstance(value, nn.Module | Tensor):
            value.load_state_dict(values[name])
    if with_random:
        _set_random_state(values["random"])


def _random_state() -> dict[str, Any]:
    generator = current_world().generator
    drawn = torch.get_rng_state() if generator is None else generator.get_state()
    return {
        "torch": ctypes.string_at(drawn.data_ptr(), drawn.nbytes),
        "python": random.getstate(),
    }


def _set_random_state(values: Mapping[str, Any]) -> None:
    generator = current_world().generator
    drawn = torch.frombuffer(bytearray(values["torch"]), dtype=torch.uint8)
    if generator is None:
        torch.set_rng_state(drawn)
    else:
        generator.set_state(drawn)
    random.setstate(values["python"])
