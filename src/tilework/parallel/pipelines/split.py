"""Splits: a model's modules dealt out to stages, and the modules of a stage.

A split names the modules before which the model is cut. Their ancestors are *containers*, whose
forward every stage runs. The other children of containers are *units*: each stage has some of them,
and stand-ins for the rest. A unit without parameters is in every stage, where it computes whatever
the stage can compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

#: Names of modules, "even", "by time", or a plan as Hugging Face's ``base_model_pp_plan``.
HowToSplit = Sequence[str] | str | Mapping[str, Any]


@dataclass(frozen=True)
class Split:
    """A model's units and the stages that have them."""

    stages: int
    #: The names of modules whose forward every stage runs.
    containers: frozenset[str]
    #: By name, in the order of the model, the stage of each unit that is in a stage.
    units: Mapping[str, int]
    #: By full name, the stage of each parameter that a container has itself.
    own: Mapping[str, int]

    def __str__(self) -> str:
        names: list[list[str]] = [[] for _ in range(self.stages)]
        for name, stage in (*self.own.items(), *self.units.items()):
            names[stage].append(name)
        return "\n".join(f"stage {stage}: {_ranges(each)}" for stage, each in enumerate(names))


def names_of_cuts(
    model: nn.Module, how: HowToSplit, stages: int, times: Callable[[], Mapping[str, float]]
) -> list[str]:
    """The modules before which a model is cut; ``times`` measures the largest chain's items."""
    modules = dict(model.named_modules())
    if how == "by time":
        cuts = _by_time(times(), stages)
    elif how == "even" or isinstance(how, Mapping):
        cuts = _evenly(chain_of(model, how), stages)
    else:
        cuts = [how] if isinstance(how, str) else list(how or ())
        if not all(isinstance(name, str) for name in cuts):
            raise TypeError(f'split takes names of modules, "even" or "by time": got {how!r}')
    for name in cuts:
        if name not in modules:
            near = [known for known in modules if known.endswith(name.rpartition(".")[2])]
            raise ValueError(
                f"split names {name!r}, and {type(model).__name__} has no module of that name"
                f"{f': did you mean {near[0]!r}?' if near and name else ''} "
                f'(names as in named_modules(), or "even" or "by time")'
            )
    if len(cuts) != stages - 1:
        raise ValueError(
            f"split names {len(cuts)} modules ({', '.join(cuts)}), which makes {len(cuts) + 1} "
            f"parts, and the schedule has {stages} stages: name {stages - 1}"
        )
    return cuts


def split_model(model: nn.Module, cuts: Sequence[str], order: Sequence[str] = ()) -> Split:
    """Deal a model's units out to stages, in an order of first uses, else as listed. Local."""
    containers = _containers(model, cuts)
    every = model.named_modules(remove_duplicate=False)
    walked = [(n, m) for n, m in every if n.rpartition(".")[0] in containers]
    listed = [n for n, m in walked if n not in containers and (n in cuts or _has_state(m))]
    names = [n for n in order if n in listed] + [n for n in listed if n not in order]
    opens = _openings(names, cuts)
    units = dict(zip(names, accumulate(int(name in opens) for name in names), strict=True))
    of_module: dict[int, str] = {}
    for name, module in walked:
        first = of_module.setdefault(id(module), name)
        if units.get(first) != units.get(name):
            raise ValueError(
                f"{first} and {name} are one module, on both sides of a cut: move the cut, or make "
                f"two modules that share their parameters"
            )
    own: dict[str, int] = {}
    for name, module in walked:
        kept = module.named_parameters(name, recurse=False) if name in containers else ()
        for path, _ in kept:
            before = order[: order.index(path)] if path in order else ()
            own[path] = max((units[each] for each in before if each in units), default=0)
    return Split(len(cuts) + 1, containers, units, own)


def _openings(names: Sequence[str], cuts: Sequence[str]) -> dict[str, str]:
    """By name of the first unit of a stage, the cut."""
    opens: dict[str, str] = {}
    for cut in cuts:
        within = [name for name in names if name == cut or name.startswith(f"{cut}.")]
        if not within or within[0] == names[0]:
            why = "nothing with parameters comes before it" if within else "it has no modules"
            raise ValueError(f"split names {cut!r}, which splits nothing: {why}")
        known = opens.setdefault(within[0], cut)
        if known != cut or cuts.count(cut) > 1:
            raise ValueError(
                f"split names {known!r} and {cut!r}, which begin at the same place: the stage "
                f"between would be empty"
            )
    return opens


def _containers(model: nn.Module, cuts: Sequence[str]) -> frozenset[str]:
    """The modules around cuts, and those that cannot be called, such as a ModuleList."""
    found = {ancestor for name in cuts for ancestor in _ancestors(name)} | {""}
    for name, module in model.named_modules(remove_duplicate=False):
        is_called = type(module).forward is not nn.Module.forward
        if name and not is_called and name.rpartition(".")[0] in found:
            found.add(name)
    return frozenset(found)


def _has_state(module: nn.Module) -> bool:
    """True if a module has parameters, or buffers that a state dict has."""
    kept = (
        key not in each._non_persistent_buffers_set
        for each in module.modules()
        for key, _ in each.named_buffers(recurse=False)
    )
    return any(True for _ in module.parameters()) or any(kept)


def _ancestors(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts))]


def chain_of(model: nn.Module, how: Any = "even") -> list[str]:
    """The names of a chain's items: of the largest ModuleList or Sequential, or of a plan."""
    named = dict(model.named_modules())
    if isinstance(how, Mapping):
        starts = {"", f"{getattr(model, 'base_model_prefix', '')}."}
        named = {f"{start}{key}": named.get(f"{start}{key}") for start in starts for key in how}
    chains = {
        name: [f"{name}.{each}".lstrip(".") for each in module._modules]
        for name, module in named.items()
        if isinstance(module, nn.ModuleList | nn.Sequential)
    }
    if not chains:
        raise ValueError(
            f"{type(model).__name__} has no ModuleList or Sequential"
            f"{' among the modules of the plan' if isinstance(how, Mapping) else ''}: name the "
            f"modules to cut at, split=[...]"
        )
    return max(chains.values(), key=lambda items: _spread(model, items))


def _spread(model: nn.Module, items: Sequence[str]) -> tuple[int, int]:
    """The modules of a chain that stages can share, all but the largest item's; the length."""
    sizes = [len(list(model.get_submodule(name).modules())) for name in items]
    return sum(sizes) - max(sizes, default=0), len(items)


def _evenly(chain: Sequence[str], stages: int) -> list[str]:
    if len(chain) < stages:
        raise ValueError(
            f"{stages} stages, and the largest chain has only {len(chain)} modules "
            f"({_ranges(chain)}): name the modules to cut at, split=[...]"
        )
    return [chain[len(chain) * stage // stages] for stage in range(1, stages)]


def _by_time(times: Mapping[str, float], stages: int) -> list[str]:
    """Cuts for which the slowest stage is as fast as possible."""
    names, costs = list(times), list(times.values())
    _evenly(names, stages)
    sums = [0.0, *accumulate(costs)]
    best: dict[int, tuple[float, list[int]]] = {end: (sums[end], []) for end in range(len(sums))}
    for stage in range(1, stages):
        best = {
            end: min(
                (max(best[cut][0], sums[end] - sums[cut]), [*best[cut][1], cut])
                for cut in range(stage, end)
            )
            for end in range(stage + 1, len(sums))
        }
    return [names[cut] for cut in best[len(names)][1]]


def measured(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, float]:
    """The seconds that each item of the largest chain takes in a forward, the best of three."""
    items = {name: model.get_submodule(name) for name in chain_of(model)}
    seconds = dict.fromkeys(items, float("inf"))
    began: dict[str, float] = {}

    def begin(name: str, *_: Any) -> None:
        began[name] = time.perf_counter()

    def end(name: str, *_: Any) -> None:
        seconds[name] = min(seconds[name], time.perf_counter() - began[name])

    with ExitStack() as hooks, torch.no_grad():
        for name, item in items.items():
            hooks.enter_context(item.register_forward_pre_hook(partial(begin, name)))
            hooks.enter_context(item.register_forward_hook(partial(end, name)))
        for _ in range(3):
            model(*args, **kwargs)
    return seconds


def _ranges(names: Sequence[str]) -> str:
    """Names as text; numbered names in a row by the first and the last."""
    runs: list[list[str]] = []
    for name in names:
        start, _, number = name.rpartition(".")
        before = runs[-1][-1].rpartition(".") if runs else ("", "", "")
        if number.isdigit() and before[2].isdigit() and before[0] == start:
            runs[-1].append(name)
        else:
            runs.append([name])
    texts = [run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return ", ".join(texts) or "no parameters"


# -- the modules of a stage ----------------------------------------------------------------------


def shallow(module: nn.Module) -> Any:
    """A copy of a module with the same parameters, children and hooks, in separate dicts."""
    copied = object.__new__(type(module))
    for name, value in module.__dict__.items():
        own = name.startswith("_") and isinstance(value, dict)  # hooks, too
        copied.__dict__[name] = value.copy() if own else value
    return copied


def copied(
    module: nn.Module,
    tensor: Callable[[str, Tensor], Tensor | None],
    unit: Callable[[str, nn.Module], nn.Module | None] = lambda name, module: None,
    name: str = "",
    known: dict[int, Any] | None = None,
) -> Any:
    """A deep copy of a module with other parameters and buffers.

    Where ``unit`` gives a module, the copy has that module. ``known`` has copies by identity.
    """
    known = {} if known is None else known
    found = unit(name, module)
    if found is None and (found := known.get(id(module))) is None:
        found = known[id(module)] = shallow(module)
        for tensors in (found._parameters, found._buffers):
            for key, value in tensors.items():
                if value is not None:
                    tensors[key] = tensor(f"{name}.{key}".lstrip("."), value)
        for key, child in module._modules.items():
            if child is not None:
                path = f"{name}.{key}".lstrip(".")
                found._modules[key] = copied(child, tensor, unit, path, known)
    return found


def tied_names(model: nn.Module, split: Split) -> list[list[str]]:
    """Parameters of several stages: the names of each, in the order of stages."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    ordered = [sorted(each, key=lambda name: stage_of(name, split)) for each in names.values()]
    return [each for each in ordered if stage_of(each[0], split) < stage_of(each[-1], split)]


def stage_of(name: str, split: Split) -> int:
    """The stage that has a parameter of this full name."""
    if name in split.own:
        return split.own[name]
    return split.units[next(each for each in _ancestors(name)[::-1] if each in split.units)]
