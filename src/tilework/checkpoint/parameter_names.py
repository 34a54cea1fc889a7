"""Names of parameters in the states of optimizers, and their match with saved names.

A parameter has its own name in the module, ``layers.0.weight``, if one module of the state has all
parameters of the optimizer; else the module's path comes before it: ``generator/0.weight``. Other
modules of the state, and their order, therefore do not matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from tilework.checkpoint.flat_state import dotted
from tilework.checkpoint.format import Path
from tilework.sharded import ShardedOptimizer

#: A parameter in a state: the path of a module, and the name in it.
Place = tuple[Path, str]
#: By a parameter's identity the places, in an order that is the same for all parameters.
Places = Mapping[int, Sequence[Place]]


def parameters_of(optimizer: Optimizer, places: Places) -> list[list[tuple[Any, Tensor]]]:
    """For each of the optimizer's parameter groups, the pairs of a unique name and a parameter.

    Parameters in no module of the state have the names that the optimizer was given
    (``named_parameters()``), or their numbers in the optimizer.
    """
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
    names = [of_modules.get(id(parameter), name) for name, parameter in given]
    times = Counter(names)
    named = [
        (number if name is None or (times[name] > 1 and id(parameter) not in of_modules) else name)
        for number, (name, (_, parameter)) in enumerate(zip(names, given, strict=True))
    ]
    pairs = iter([(name, parameter) for name, (_, parameter) in zip(named, given, strict=True)])
    return [[next(pairs) for _ in group["params"]] for group in optimizer.param_groups]


def names_of(placed: Places) -> dict[int, str]:
    """By ``id`` of a parameter, a name from the places of the optimizer's parameters in modules.

    Example:
        >>> names_of({1: [(("net",), "weight")], 2: [(("net",), "bias")]})
        {1: 'weight', 2: 'bias'}
        >>> names_of({1: [(("a",), "weight")], 2: [(("b", 0), "weight")]})
        {1: 'a/weight', 2: 'b.0/weight'}
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

    Example:
        >>> possible_names(("model",), "0.weight")
        ('0.weight', 'model/0.weight', "('model',)/0.weight", 'model.0.weight')
    """
    return own, f"{dotted(path)}/{own}", f"{path!r}/{own}", dotted((*path, own))


def one_to_one(possible: Mapping[Any, Collection[Any]]) -> dict[Any, Any]:
    """Match each key with one of the key's possible values, and no value with two keys.

    A key is left out if the match is not certain.

    Example:
        >>> one_to_one({"a/weight": ["weight"], "b/weight": ["weight", "b.weight"]})
        {'b/weight': 'b.weight', 'a/weight': 'weight'}
        >>> one_to_one({"a/weight": ["weight"], "b/weight": ["weight"]})
        {}
    """
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
