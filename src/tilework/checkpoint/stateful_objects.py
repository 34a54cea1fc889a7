"""Objects with state as containers: modules, optimizers, generators, and whatever has state_dict().

States of optimizers are saved by the names that modules of the same state give the parameters.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tilework.checkpoint.flat_state import dotted
from tilework.checkpoint.flattening import found_in
from tilework.checkpoint.format import Path
from tilework.comm.world import current_world
from tilework.sharded import ShardedOptimizer, named_params_with_sharded_tensor


@runtime_checkable
class Stateful(Protocol):
    """An object that can give and load a state; classes need not derive from this."""

    def state_dict(self) -> dict[str, Any]:
        """The state: any nesting of containers, tensors and plain values."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Load a state that :meth:`state_dict` returned."""


#: A parameter in a state: the path of a module, and the name in it.
Place = tuple[Path, str]
#: By a parameter's identity the places, in an order that is the same for all parameters.
Places = Mapping[int, Sequence[Place]]


def parameters_of(optimizer: Optimizer, places: Places) -> list[list[tuple[Any, Tensor]]]:
    """The parameters of each group, with names in modules, given names, or numbers."""
    if isinstance(optimizer, ShardedOptimizer):
        return [
            [(name, optimizer.named_params[name]) for name in group] for group in optimizer._names
        ]
    given = [
        pair
        for group in optimizer.param_groups
        for pair in zip(
            group.get("param_names") or [None] * len(group["params"]), group["params"], strict=True
        )
    ]
    of_modules = names_of({id(p): places[id(p)] for _, p in given if id(p) in places})
    times = Counter(of_modules.get(id(parameter), name) for name, parameter in given)
    numbered = [
        (number if name is None or times[name] > 1 else name, parameter)
        for number, (name, parameter) in enumerate(given)
    ]
    pairs = iter([(of_modules.get(id(p), name), p) for name, p in numbered])
    return [[next(pairs) for _ in group["params"]] for group in optimizer.param_groups]


def names_of(placed: Places) -> dict[int, str]:
    """By ``id`` of a parameter, a name from the places of the optimizer's parameters in modules.

    The module's path comes first unless one module of the state has all of them, so that other
    modules of the state, and their order, do not matter.
    """
    by_path = {parameter: dict(each) for parameter, each in placed.items()}
    for path in next(iter(by_path.values()), ()):
        if all(path in each for each in by_path.values()):
            return {parameter: each[path] for parameter, each in by_path.items()}
    first = {parameter: each[0] for parameter, each in placed.items()}
    names = {parameter: f"{dotted(path)}/{own}" for parameter, (path, own) in first.items()}
    if len(set(names.values())) < len(names):  # keys that contain dots, or 1 beside "1"
        names = {parameter: f"{path!r}/{own}" for parameter, (path, own) in first.items()}
    return names


def possible_names(path: Path, own: str) -> tuple[str, ...]:
    """The names that a checkpoint may have for the parameter ``own`` of the module at ``path``.

    Checkpoints of earlier versions may have the first or the last.
    """
    return own, f"{dotted(path)}/{own}", f"{path!r}/{own}", dotted((*path, own))


def one_to_one(possible: Mapping[Any, Collection[Any]]) -> dict[Any, Any]:
    """Match each key with one of the key's possible values, if no other key may have it."""
    askers: dict[Any, set[Any]] = {}
    for key, values in possible.items():
        for value in values:
            askers.setdefault(value, set()).add(key)
    found: dict[Any, Any] = {}
    changed: Collection[Any] = askers
    while changed:
        only: dict[Any, list[Any]] = {}  # values that only this key may have
        for value in changed:
            if len(askers[value]) == 1:
                only.setdefault(next(iter(askers[value])), []).append(value)
        new = {key: values[0] for key, values in only.items() if len(values) == 1}
        found.update(new)
        changed = dict.fromkeys(value for key in new for value in possible[key])
        for key, value in new.items():
            for other in possible[key]:
                askers[other].discard(key)
            askers[value].clear()
    return found


#: Wrappers with a single child, by class name, with the child's name: the classes are in higher
#: packages, or in torch.
_WRAPPERS = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
}


def wrapped_attribute(module: nn.Module) -> str | None:
    """The attribute of a wrapper, such as DDP, that has the inner module; None if no wrapper."""
    return _WRAPPERS.get(type(module).__name__)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside wrappers such as DDP or a compiled module; another module unchanged."""
    while (attribute := wrapped_attribute(module)) is not None:
        inner = getattr(module, attribute, None)
        if not isinstance(inner, nn.Module):
            break
        module = inner
    return module


def is_lazy(tensor: Tensor) -> bool:
    """True for a parameter or buffer of a lazy module, which has no shape yet."""
    return isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer)


def has_state(value: Any) -> bool:
    """True if an object has the methods ``state_dict`` and ``load_state_dict``."""
    return (
        callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
        and not isinstance(value, type)
    )


def modules_of(state: Any) -> Iterator[tuple[Path, nn.Module]]:
    """The modules in a nesting of dicts, lists and tuples, unwrapped, each with the path."""
    return ((path, unwrapped(module)) for path, module in found_in(state, nn.Module))


def places_of_parameters(state: Any) -> dict[int, list[Place]]:
    """By ``id`` of a parameter, all places in the state's modules; the largest module first."""
    modules = [
        (path, list(named_params_with_sharded_tensor(module))) for path, module in modules_of(state)
    ]
    modules.sort(key=lambda each: (-len(each[1]), len(each[0]), [str(key) for key in each[0]]))
    places: dict[int, list[Place]] = {}
    # Stages of a pipeline have tied parameters under several names, on several ranks.
    tied = {path: getattr(module, "first_names", None) for path, module in modules_of(state)}
    first = {path: each if isinstance(each, Mapping) else {} for path, each in tied.items()}
    for path, parameters in modules:
        for name, parameter in parameters:
            places.setdefault(id(parameter), []).append((path, first[path].get(name, name)))
    return places


def is_split(optimizer: Optimizer) -> bool:
    """True if each rank has only the states of its own parameters (ZeroRedundancyOptimizer)."""
    return callable(getattr(optimizer, "owner_of", None)) and hasattr(optimizer, "optim")


def optimizer_state(optimizer: Optimizer, places: Places) -> dict[str, Any]:
    """The state dict of an optimizer, with names of parameters in the place of numbers."""
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.state_dict()
    groups = parameters_of(optimizer, places)
    listed = [pair for group in groups for pair in group]
    if is_split(optimizer):
        inner: Any = optimizer.optim  # type: ignore[attr-defined]
        own = {} if inner is None else inner.state
        packed: dict[str, Any] = {
            "state": {at: own[p] for at, (_, p) in enumerate(listed) if own.get(p)},
            "param_groups": [dict(group) for group in optimizer.param_groups],
        }
    else:
        packed = dict(optimizer.state_dict())
    packed["state"] = {
        listed[at][0] if isinstance(at, int) else at: dict(state)
        for at, state in packed["state"].items()
        if state
    }
    packed["param_groups"] = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        | {"params": [name for name, _ in pairs]}
        for group, pairs in zip(packed["param_groups"], groups, strict=True)
    ]
    return packed


class Containers:
    """Turns the objects in one state into containers: dicts, lists and tensors."""

    def __init__(self, state: Any) -> None:
        self._places = places_of_parameters(state)

    def __call__(self, value: Any, path: Path) -> Any:
        if isinstance(value, nn.Module):
            return unwrapped(value).state_dict()
        if isinstance(value, Optimizer):
            return optimizer_state(value, self._places)
        if isinstance(value, torch.Generator):
            return value.get_state()
        return value.state_dict() if has_state(value) else value


class RandomState:
    """The random generators of this process, as a part of a state: for an exact resume.

    Python's generator, numpy's if it is loaded, and torch's default generators for the CPU and for
    CUDA devices. DTensors draw from torch's default generator, and therefore resume as well. States
    that differ between ranks are saved for each rank.
    """

    def state_dict(self) -> dict[str, Any]:
        """The states of all generators. Local."""
        state: dict[str, Any] = {
            "python": random.getstate(),
            "torch": torch.default_generator.get_state(),
        }
        if (own := current_world().generator) is not None:
            state["rank"] = own.get_state()
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state_all()
        if (numpy := sys.modules.get("numpy")) is not None and hasattr(numpy, "random"):
            state["numpy"] = numpy.random.get_state()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Give the generators the states that :meth:`state_dict` returned. Local."""
        if "python" in state_dict:
            random.setstate(_tuples(state_dict["python"]))
        if "torch" in state_dict:
            torch.default_generator.set_state(state_dict["torch"])
        if (own := current_world().generator) is not None:
            own.set_state(state_dict.get("rank", state_dict.get("torch")))
        if "cuda" in state_dict and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state_dict["cuda"])
        if "numpy" in state_dict and (numpy := sys.modules.get("numpy")) is not None:
            # A tensor, if it comes from a format without arrays of numpy.
            state = [e.numpy() if isinstance(e, Tensor) else e for e in state_dict["numpy"]]
            numpy.random.set_state(tuple(state))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value
