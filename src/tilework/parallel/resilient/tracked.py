"""The state of a training loop: tensors by name, with the ranks that hold them; other values."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tilework.comm.world import current_world, get_rank, get_world_size
from tilework.dtensor import DTensor
from tilework.dtensor.internal import layout_of, local_tensor_of, wrap
from tilework.layout import Box, Tile, Tiling
from tilework.parallel.pipelines.stages import Stages
from tilework.parallel.resilient.catalog import Described, described
from tilework.parallel.zero_redundancy import ZeroRedundancyOptimizer
from tilework.tiled import TiledTensor

State = Mapping[str, Any]
#: The end of the names under which modules' ``get_extra_state()`` is in their ``state_dict()``.
_EXTRA_STATE: Final = "_extra_state"
#: The loop's own entry among the plain data: states of random generators. No key of a state, where
#: "random" is an ordinary key.
_RANDOM: Final = ""


class FoundTensor(NamedTuple):
    """A tensor of a state at this moment: programs may replace it by another tensor."""

    #: The key in the state; then, after slashes, the path in the module or optimizer.
    name: str
    tensor: Tensor
    #: The ranks that hold equal copies of a plain tensor; None: all ranks.
    owners: tuple[int, ...] | None
    #: True if an optimizer has made the tensor, as optimizers do in the first step.
    of_optimizer: bool = False

    @property
    def facts(self) -> tuple[object, ...]:
        """All that decides how a snapshot of the tensor is laid out: shape and dtype first."""
        tensor = self.tensor
        tiling = tensor.tiling if isinstance(tensor, TiledTensor) else None
        return tuple(tensor.shape), tensor.dtype, self.name, self.owners, tiling


@dataclass(frozen=True, slots=True)
class Contents:
    """Everything in a state."""

    #: The tensors that this rank knows of, each once.
    tensors: list[FoundTensor]
    #: Values other than tensors, by the name of the module, optimizer or object.
    plain: dict[str, Any]


@dataclass(slots=True)
class Tracked:
    """A tensor of a state, with the boxes of it that ranks hold."""

    #: ``Snapshots.fits`` replaces the entry when the program has replaced the tensor.
    found: FoundTensor
    #: For a plain tensor: a single tile of all owners.
    tiling: Tiling = field(init=False)
    #: ``found.facts`` when the tensor was found.
    facts: tuple[object, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Find the ranks that hold the tensor."""
        tensor, self.facts = self.found.tensor, self.found.facts
        if isinstance(tensor, TiledTensor):
            self.tiling = tensor.tiling
            return
        shape = tuple(tensor.shape)
        whole = Box((0,) * len(shape), shape)
        owners = self.found.owners or tuple(range(get_world_size()))
        self.tiling = Tiling.of_tiles(shape, [Tile(whole, owners)])

    @property
    def name(self) -> str:
        """The name in the state."""
        return self.found.name

    def locals(self) -> list[Tensor]:
        """This rank's tensors, one for each tile that the rank holds."""
        tensor = self.found.tensor
        if isinstance(tensor, TiledTensor):
            return [tile.detach() for tile in tensor.local_tiles()]
        return [tensor.detach()] if self.tiling.of(get_rank()) else []

    def described(self) -> Described:
        """The tensor's description as plain data."""
        return described(self.name, self.found.tensor.dtype, self.tiling)


def contents_of(state: State, fills: bool = False) -> Contents:
    """The tensors of the state that this rank knows of, and the other values. Local.

    All ranks hold equal copies of plain parameters and optimizer states, in a pipeline all ranks of
    a stage. Of a plain buffer the copy of the first rank is valid; with ``fills`` all copies are
    listed, as targets. A tensor that is in several places is listed once.

    Raises:
        TypeError: The state has something that cannot be saved and restored.
    """
    found: dict[int, FoundTensor] = {}
    plain: dict[str, Any] = {_RANDOM: _random_state()}
    modules = {name: value for name, value in state.items() if isinstance(value, nn.Module)}
    for name, module in modules.items():
        plain[name] = _add_module(name, module, found, fills)
    of_modules = {key: each.name for key, each in found.items()}
    for name, value in state.items():
        if isinstance(value, Optimizer):
            plain[name] = _add_optimizer(name, value, of_modules, found)
        elif isinstance(value, Tensor):
            found.setdefault(id(value), FoundTensor(name, value, None))
        elif name not in modules:
            plain[name] = _state_of(name, value)
    return Contents([*found.values()], plain)


def tracked_tensors(state: State) -> list[Tracked]:
    """The tensors of the state as targets of a restore. Local.

    A restore fills plain buffers on all ranks; a snapshot has them from the first rank.
    """
    return [Tracked(found) for found in contents_of(state, fills=True).tensors]


def _add_module(
    name: str, module: nn.Module, found: dict[int, FoundTensor], fills: bool
) -> dict[str, Any]:
    """Add a module's tensors to ``found``; returns the rest of the ``state_dict()``."""
    extra = {}
    owners = module.ranks if isinstance(module, Stages) else None
    for key, value in _state_of_module(module):
        if isinstance(value, Tensor) and not key.endswith(_EXTRA_STATE):
            is_valid = fills or isinstance(value, nn.Parameter)
            of = owners if is_valid else (owners or (0,))[:1]
            found.setdefault(id(value), FoundTensor(f"{name}/{key}", value, of))
        else:
            extra[key] = value
    return extra


def _state_of_module(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The state, in a pipeline with the first name of a tied parameter on all ranks."""
    first = module.first_names if isinstance(module, Stages) else {}
    for key, value in module.state_dict(keep_vars=True).items():
        yield first.get(key, key), value


def _add_optimizer(
    name: str, optimizer: Optimizer, of_modules: Mapping[int, str], found: dict[int, FoundTensor]
) -> dict[str, Any]:
    """Add an optimizer's tensors to ``found``; returns the settings and other values."""
    names = _parameter_names(optimizer, of_modules)
    parameters: dict[str, dict[str, Any]] = {}
    others: dict[Any, Any] = {}
    inner = _inner(optimizer)
    for parameter, values in inner.state.items() if inner is not None else ():
        path = names.get(parameter)
        if path is None:  # a state under a name of the optimizer's own
            others[parameter] = values
            continue
        known = found.get(id(parameter))
        owners = None if known is None else known.owners
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            owners = (optimizer.owner_of(cast("nn.Parameter", parameter)),)
        for key, value in values.items():
            if isinstance(value, Tensor):
                number = id(value)
                if number not in found:
                    found[number] = FoundTensor(f"{name}/{path}/{key}", value, owners, True)
            else:
                parameters.setdefault(path, {})[key] = value
    groups = [{k: v for k, v in x.items() if k != "params"} for x in optimizer.param_groups]
    return {"groups": groups, "parameters": parameters, "others": others}


def _state_of(name: str, value: Any) -> Any:
    if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
        raise TypeError(
            f"state[{name!r}] is of type {type(value).__name__}: a state has modules, optimizers, "
            f"tensors, and objects with state_dict() and load_state_dict()"
        )
    return value.state_dict()


def _inner(optimizer: Optimizer) -> Optimizer | None:
    """The optimizer that keeps the states; None if this rank has no part of the states."""
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer


def _parameter_names(optimizer: Optimizer, of_modules: Mapping[int, str]) -> dict[Any, str]:
    """A name for each parameter of an optimizer: the name in the module, or a number."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return {p: of_modules.get(id(p), f"#{number}") for number, p in enumerate(parameters)}


def _optimizers(state: State) -> Iterator[tuple[str, Optimizer, Optimizer, dict[Any, str]]]:
    of_modules: dict[int, str] = {}
    for name, value in state.items():
        if isinstance(value, nn.Module):
            for key, tensor in _state_of_module(value):
                of_modules.setdefault(id(tensor), f"{name}/{key}")
    for name, optimizer in state.items():
        if not isinstance(optimizer, Optimizer):
            continue
        inner = _inner(optimizer)
        if inner is not None:
            names = _parameter_names(optimizer, of_modules)
            mine = {p: path for p, path in names.items() if _is_mine(optimizer, p)}
            yield name, optimizer, inner, mine


def make_optimizer_states(
    state: State, entries: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> None:
    """Make the optimizer states that a snapshot will fill, with the shapes and dtypes of
    ``entries``. Local.
    """
    for name, _, inner, mine in _optimizers(state):
        keys: dict[str, list[str]] = {}
        for entry in entries:
            if entry.startswith(f"{name}/"):
                path, _, key = entry.rpartition("/")
                keys.setdefault(path, []).append(key)
        inner.state.clear()
        for parameter, parameter_name in mine.items():
            path = f"{name}/{parameter_name}"
            if path in keys:
                inner.state[parameter] = {
                    key: _empty_state(parameter, key, *entries[f"{path}/{key}"])
                    for key in keys[path]
                }


def _is_mine(optimizer: Optimizer, parameter: Tensor) -> bool:
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        return True
    return optimizer.owner_of(cast("nn.Parameter", parameter)) == get_rank()


def _empty_state(parameter: Tensor, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if key != "step" and shape == tuple(parameter.shape):
        if isinstance(parameter, DTensor):
            local = torch.zeros_like(local_tensor_of(parameter).detach(), dtype=dtype)
            return wrap(local, layout_of(parameter))
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    return torch.zeros(shape, dtype=dtype)


# -- values other than tensors--------------------------------------------------------------------


def parameter_values(plain: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The values other than tensors that optimizers keep: by optimizer, then by parameter. They go
    to the rank that steps on the parameter later.
    """
    return {
        name: value["parameters"]
        for name, value in plain.items()
        if isinstance(value, dict) and value.keys() == {"groups", "parameters", "others"}
    }


def set_plain(
    state: State, plain: Mapping[str, Any], of_parameters: Mapping[str, Mapping[str, Any]]
) -> None:
    """Set this rank's values, from :func:`contents_of`, and the :func:`parameter_values` of all
    ranks, also on a state for other ranks. Local.
    """
    for name, value in state.items():
        if name not in plain:
            continue
        if isinstance(value, Optimizer):
            for group, settings in zip(value.param_groups, plain[name]["groups"], strict=True):
                group.update(settings)
        elif isinstance(value, nn.Module):
            if plain[name]:
                value.load_state_dict(plain[name], strict=False)
        elif not isinstance(value, Tensor):
            value.load_state_dict(plain[name])
    for name, _, inner, mine in _optimizers(state):
        for parameter, path in mine.items():
            values = of_parameters.get(name, {}).get(path)
            if values:
                inner.state[parameter] = {**inner.state.get(parameter, {}), **values}
        inner.state.update(plain.get(name, {}).get("others", {}))
    _set_random_state(plain[_RANDOM])


def _random_state() -> dict[str, Any]:
    generator = current_world().generator
    drawn = torch.get_rng_state() if generator is None else generator.get_state()
    states = {
        "torch": ctypes.string_at(drawn.data_ptr(), drawn.nbytes),
        "python": random.getstate(),
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = name, keys.tobytes(), *rest
    return states


def _set_random_state(values: Mapping[str, Any]) -> None:
    generator = current_world().generator
    drawn = torch.frombuffer(bytearray(values["torch"]), dtype=torch.uint8)
    if generator is None:
        torch.set_rng_state(drawn)
    else:
        generator.set_state(drawn)
    random.setstate(values["python"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in values:
        name, keys, *rest = values["numpy"]
        numpy.random.set_state((name, numpy.frombuffer(keys, numpy.uint32), *rest))
