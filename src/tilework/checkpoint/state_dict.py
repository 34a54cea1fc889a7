"""State dicts of models and optimizers by name, whole or sharded: torch's functions of these names.

Names are those of the model without data parallelism or compilers around the model or its parts.
Sharded tensors of any kind are accepted: of ``fully_shard``, of plans, DTensors, ShardedTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tilework.checkpoint.filling import is_in_module, unfillable
from tilework.checkpoint.filling_optimizers import load_states
from tilework.checkpoint.save_planning import cut_box
from tilework.checkpoint.stateful_objects import is_split, unwrapped, wrapped_attribute
from tilework.comm.operations.internal import broadcast, broadcast_object_list, device_of
from tilework.comm.world import get_default_group, get_rank, is_initialized
from tilework.dtensor import DTensor
from tilework.dtensor.internal import is_torch_dtensor
from tilework.layout import Box
from tilework.layout.internal import whole_box
from tilework.sharded import ShardedOptimizer
from tilework.tiled import TiledTensor

#: The maximum of bytes under way at once.
PIECE_BYTES = 32 << 20


def copy_into(target: Tensor, value: Tensor) -> None:
    """Copy the elements of ``value`` into ``target``. Collective if ``value`` has other shards."""
    target, value = _ours(target), _ours(value)
    if isinstance(value, TiledTensor):
        if isinstance(target, TiledTensor) and target.tiling == value.tiling:
            for own, given in zip(target.local_tiles(), value.local_tiles(), strict=True):
                own.detach().copy_(given.detach())
            return
        value = value.full_tensor().detach()  # type: ignore[attr-defined]
    for box, tile in _tiles(target):
        tile.copy_(value.detach()[box.slices])


def broadcast_into(target: Tensor, value: Any) -> None:
    """Send the elements of rank 0's ``value.tensor`` into ``target`` on all ranks. Collective."""
    group = get_default_group()
    tiles = list(_tiles(_ours(target)))
    for box in cut_box(whole_box(value.shape), value.dtype.itemsize, PIECE_BYTES):
        piece = torch.empty(box.sizes, dtype=value.dtype, device=device_of(group))
        if get_rank() == 0:
            piece.copy_(value.tensor.detach()[box.slices])
        broadcast(piece, group_src=group.global_ranks.index(0), group=group)
        for own, tile in tiles:
            shared = own.intersection(box)
            if shared is not None:
                tile[shared.relative_to(own).slices] = piece[shared.relative_to(box).slices]


def _ours(tensor: Tensor) -> Tensor:
    return DTensor.from_torch(tensor) if is_torch_dtensor(tensor) else tensor


def _tiles(tensor: Tensor) -> list[tuple[Box, Tensor]]:
    if not isinstance(tensor, TiledTensor):
        return [(whole_box(tuple(tensor.shape)), tensor.detach())]
    boxes = tensor.tiling.boxes_of(get_rank())
    return list(zip(boxes, [tile.detach() for tile in tensor.local_tiles()], strict=True))


State = dict[str, Any]
Optimizers = Optimizer | Iterable[Optimizer]


@dataclass
class StateDictOptions:
    """Settings of the functions in this module, with torch's names.

    Args:
        full_state_dict: True: tensors are whole, not sharded.
        cpu_offload: True: returned tensors are on the CPU. With ``full_state_dict``, only rank 0
            gets the state dict.
        ignore_frozen_params: True: parameters with ``requires_grad=False`` are left out.
        keep_submodule_prefixes: With ``submodules``: names begin at the model, not at the
            submodule.
        strict: True: setting a model or an optimizer raises if names are missing; a model, also if
            names are unexpected.
        broadcast_from_rank0: True: when a state is set, only rank 0 needs to have it.
        flatten_optimizer_state_dict: True: the state dict of optimizers is one flat dict, with keys
            such as ``"state.layer.weight.exp_avg"`` and ``"param_groups.layer.weight.lr"``.
        dsd_fqn_modifiers: Ignored: in torch it serves modules that rename their entries.

    Raises:
        ValueError: ``broadcast_from_rank0`` without ``full_state_dict``.
    """

    full_state_dict: bool = False
    cpu_offload: bool = False
    ignore_frozen_params: bool = False
    keep_submodule_prefixes: bool = True
    strict: bool = True
    broadcast_from_rank0: bool = False
    flatten_optimizer_state_dict: bool = False
    dsd_fqn_modifiers: str = "_fqn_modifiers"

    def __post_init__(self) -> None:
        if self.broadcast_from_rank0 and not self.full_state_dict:
            raise ValueError(
                "broadcast_from_rank0=True is for whole tensors: say full_state_dict=True as well"
            )

    @property
    def is_for_rank0(self) -> bool:
        return self.full_state_dict and self.cpu_offload


# -- models -------------------------------------------------------------------------------------


def get_model_state_dict(
    model: nn.Module,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> State:
    """The state dict of a model, with whole or sharded tensors.

    With ``full_state_dict`` it is collective over the ranks of sharded tensors; else local.

    Args:
        model: The model, in any parallelism.
        submodules: Only the state of these submodules; None: all.
        options: Settings. Sharded tensors share memory with the model, unless they are moved to
            the CPU.

    Example: see docs/how-to/checkpoints.md.
    """
    options = options or StateDictOptions()
    names = _Names(model, submodules, options)
    return _delivered(dict(names.state()), options)


def set_model_state_dict(
    model: nn.Module,
    model_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> Any:
    """Fill a model from a state dict, whole or sharded in any layout.

    Each rank takes its parts from whole tensors without communication. With
    ``broadcast_from_rank0`` only rank 0 has the tensors, and sends them in pieces of 32 MiB: then
    the call is collective over the default group.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, as from ``load_state_dict``.

    Raises:
        RuntimeError: With ``strict``, names are missing or unexpected. Nothing was changed.
        ValueError: A tensor has another shape, or the model's is on ``meta``. Nothing was changed.
    """
    options = options or StateDictOptions()
    module = unwrapped(model)
    given = _from_rank0(model_state_dict) if options.broadcast_from_rank0 else model_state_dict
    contents = _Names(model, None, options)
    own = dict(contents.state())
    missing = [name for name in own if name not in given]
    unexpected = [name for name in given if name not in own]
    if options.strict and (missing or unexpected):
        raise RuntimeError(
            f"{type(module).__name__} and the state dict have other names: missing "
            f"{missing[:8] or 'none'}, unexpected {unexpected[:8] or 'none'}; strict=False leaves "
            f"them as they are"
        )
    pairs = [(name, own[name], given[name]) for name in own if name in given]
    for name, target, value in pairs:
        _check_pair(name, target, value)
    in_place = is_in_module(module, own)
    with torch.no_grad():
        filled = {name: _filled(target, value) for name, target, value in pairs}
    if not in_place:
        raw = {contents.raw[name]: value for name, value in filled.items()}
        module.load_state_dict(raw, strict=False)
    return nn.modules.module._IncompatibleKeys(missing, unexpected)


class _Names:
    """A state dict's names without wrappers: the raw names, and names by ``id`` of parameter."""

    def __init__(
        self, model: nn.Module, submodules: set[nn.Module] | None, options: StateDictOptions
    ) -> None:
        self._module = unwrapped(model)
        self._options = options
        self._prefixes = dict(_prefixes(self._module))
        inside = {id(each) for each in submodules or ()}
        self._inside = [
            f"{self._clean(f'{name}.')}"
            for name, each in self._module.named_modules()
            if id(each) in inside
        ]
        if inside and not self._inside:
            raise ValueError("submodules must be modules of the model, and none of those given is")
        self._all = submodules is None or not submodules
        contents = self._module.state_dict()  # fully_shard gives shards for gathered parameters
        self.raw = {self._clean(name): name for name in contents}
        self._contents = contents
        self.parameters: dict[int, str] = {}
        self._frozen: set[str] = set()
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            self.parameters.setdefault(id(parameter), self._clean(name))
            if not parameter.requires_grad:
                self._frozen.add(self._clean(name))

    def state(self) -> Iterator[tuple[str, Any]]:
        for name, raw in self.raw.items():
            short = self.asked(name)
            if short is not None:
                yield short, self._contents[raw]

    def asked(self, name: str) -> str | None:
        """The name to return for a name of the model; None if the options leave it out."""
        if self._options.ignore_frozen_params and name in self._frozen:
            return None
        prefix = next((each for each in self._inside if name.startswith(each)), "")
        if not prefix and not self._all:
            return None
        return name if self._options.keep_submodule_prefixes else name.removeprefix(prefix)

    def _clean(self, name: str) -> str:
        prefix = name
        while prefix not in self._prefixes:
            prefix = prefix.rstrip(".").rpartition(".")[0]
            prefix = f"{prefix}." if prefix else ""
        return self._prefixes[prefix] + name[len(prefix) :]


def _prefixes(module: nn.Module, raw: str = "", clean: str = "") -> Iterator[tuple[str, str]]:
    """For each module within, the prefixes of names with wrappers and without wrappers."""
    yield raw, clean
    wrapped = wrapped_attribute(module)
    for name, child in module._modules.items():  # named_children() has a shared child once
        if child is not None:
            yield from _prefixes(
                child, f"{raw}{name}.", clean if name == wrapped else f"{clean}{name}."
            )


def _filled(target: Any, value: Any) -> Any:
    if not isinstance(target, Tensor):
        return value
    (broadcast_into if isinstance(value, _OfRank0) else copy_into)(target, value)
    return target


def _check_pair(name: str, target: Any, value: Any) -> None:
    if not isinstance(target, Tensor):
        return
    shape = getattr(value, "shape", None)
    if shape is None or tuple(shape) != tuple(target.shape):
        was = type(value).__name__ if shape is None else f"of shape {list(shape)}"
        raise ValueError(
            f"{name} is a tensor of shape {list(target.shape)}, the state dict's is {was}"
        )
    if problem := unfillable(target):
        raise ValueError(f"{name} cannot be filled: it is {problem}")


# -- optimizers ---------------------------------------------------------------------------------


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> State:
    """The state dict of optimizers, with names of the model's parameters instead of numbers.

    Collective as for :func:`get_model_state_dict`. An optimizer that has not stepped
    has no states here (torch's function makes a step of size 0 first). To load into such an
    optimizer, use ``checkpoint.load(path, into={"optimizer": optimizer})``.

    Raises:
        ValueError: An optimizer has a parameter that the model lacks.
        TypeError: Each rank has only some parameters' states (ZeroRedundancyOptimizer).
    """
    options = options or StateDictOptions()
    names = _Names(model, submodules, options)
    state: State = {"state": {}, "param_groups": []}
    for optimizer in _listed(optimizers):
        own = optimizer.state_dict()
        for packed, group in zip(own["param_groups"], optimizer.param_groups, strict=True):
            listed = [names.asked(_name_of(names, p)) for p in group["params"]]
            kept = [(at, n) for at, n in zip(packed["params"], listed, strict=True) if n]
            settings = {key: v for key, v in packed.items() if key not in _PARAMETERS}
            state["param_groups"].append({**settings, "params": [name for _, name in kept]})
            state["state"].update(
                {n: dict(own["state"][at]) for at, n in kept if at in own["state"]}
            )
    state = _delivered(state, options)
    return _flat(state) if options.flatten_optimizer_state_dict and state else state


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Give optimizers their states, by the names of the model's parameters.

    Whole states of sharded parameters are cut like the parameters. Collective as for
    :func:`set_model_state_dict`.

    Raises:
        ValueError: An optimizer has a parameter that the model lacks.
        RuntimeError: With ``strict``, the state dict lacks a parameter of an optimizer.
    """
    options = options or StateDictOptions()
    names = _Names(model, None, options)
    listed = [
        (
            optimizer,
            [[_name_of(names, p) for p in group["params"]] for group in optimizer.param_groups],
        )
        for optimizer in _listed(optimizers)
    ]
    given = _from_rank0(optim_state_dict) if options.broadcast_from_rank0 else optim_state_dict
    given = _nested(given)
    group_of = {name: group for group in given["param_groups"] for name in group["params"]}
    for _, groups in listed:
        asked = [name for group in groups for name in group if names.asked(name)]
        if options.strict and (missing := [name for name in asked if name not in group_of]):
            raise RuntimeError(f"the state dict lacks the optimizer's parameters {missing[:8]}")
    for optimizer, groups in listed:
        _set_one(optimizer, groups, given["state"], group_of)


#: Keys of a parameter group that are not settings.
_PARAMETERS = ("params", "param_names")


def _set_one(
    optimizer: Optimizer,
    groups: list[list[str]],
    given: Mapping[str, Any],
    group_of: Mapping[str, Mapping[str, Any]],
) -> None:
    named, options = [], []
    for own, names in zip(optimizer.param_groups, groups, strict=True):
        named.append(list(zip(names, own["params"], strict=True)))
        first = next((group_of[name] for name in names if name in group_of), {})
        options.append({key: value for key, value in first.items() if key not in _PARAMETERS})
    states = {
        number: {key: _state_like(parameter, value) for key, value in given[name].items()}
        for number, (name, parameter) in enumerate(chain(*named))
        if name in given
    }
    load_states(optimizer, named, states, options)


def _state_like(parameter: Tensor, value: Any) -> Any:
    if not isinstance(value, Tensor | _OfRank0):
        return value
    if tuple(value.shape) != tuple(parameter.shape) or not parameter.dim():
        target = torch.empty(tuple(value.shape), dtype=value.dtype)
    else:
        target = torch.empty_like(parameter.detach(), dtype=value.dtype)
    with torch.no_grad():
        _filled(target, value)
    return target


def _listed(optimizers: Optimizers) -> list[Optimizer]:
    listed = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    for each in listed:
        if isinstance(each, ShardedOptimizer) or is_split(each):
            raise TypeError(
                f"{type(each).__name__} has its states by ranks: save and load it with "
                f"tilework.checkpoint, save({{'model': model, 'optimizer': optimizer}}, path)"
            )
    return listed


def _name_of(names: _Names, parameter: Tensor) -> str:
    name = names.parameters.get(id(parameter))
    if name is None:
        raise ValueError(
            f"the optimizer has a parameter of shape {list(parameter.shape)} that the model lacks: "
            f"make the optimizer after the model is sharded, or pass the optimizer's model"
        )
    return name


def _flat(state: State) -> State:
    flat: State = {}
    for name, each in state["state"].items():
        flat.update({f"state.{name}.{key}": value for key, value in each.items()})
    for group in state["param_groups"]:
        for name in group["params"]:
            for key in group.keys() - {"params"}:
                flat[f"param_groups.{name}.{key}"] = group[key]
    return flat


def _nested(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state dict of optimizers in nested form; a flat dict gives a group per parameter."""
    if "param_groups" in state:
        return state
    states: dict[str, State] = {}
    groups: dict[str, State] = {}
    for path, value in state.items():
        kind, _, rest = path.partition(".")
        name, _, key = rest.rpartition(".")
        if kind == "state":
            states.setdefault(name, {})[key] = value
        elif kind == "param_groups":
            groups.setdefault(name, {"params": [name]})[key] = value
        else:
            raise ValueError(
                f"{path!r} is in no state dict of optimizers: they have 'state' and "
                f"'param_groups', or names that begin with them"
            )
    return {"state": states, "param_groups": list(groups.values())}


# -- both ---------------------------------------------------------------------------------------


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[State, State]:
    """The results of :func:`get_model_state_dict` and of :func:`get_optimizer_state_dict`."""
    of_model = get_model_state_dict(model, submodules=submodules, options=options)
    return of_model, get_optimizer_state_dict(
        model, optimizers, submodules=submodules, options=options
    )


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> Any:
    """Call :func:`set_model_state_dict`, then :func:`set_optimizer_state_dict`.

    Returns:
        The missing and unexpected names of the model.
    """
    keys = set_model_state_dict(model, model_state_dict, options=options)
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    return keys


def _delivered(state: State, options: StateDictOptions) -> State:
    """A state dict with tensors as the options ask; empty on ranks that do not get it."""
    keeps = not options.is_for_rank0 or not is_initialized() or get_rank() == 0

    def deliver(tensor: Tensor) -> Tensor | None:
        if options.full_state_dict and (
            isinstance(tensor, TiledTensor) or is_torch_dtensor(tensor)
        ):
            tensor = tensor.full_tensor()  # type: ignore[attr-defined]
        if not keeps:
            return None
        return tensor.detach().cpu() if options.cpu_offload else tensor.detach()

    made: State = _mapped(state, deliver)
    return made if keeps else {}


def _mapped(value: Any, function: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _mapped(each, function) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(each, function) for each in value)
    return value


@dataclass(frozen=True)
class _OfRank0:
    """Stands on all ranks for a tensor that only rank 0 has."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    tensor: Tensor | None = None


def _from_rank0(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Send the state dict of rank 0 to all ranks, with an _OfRank0 for each tensor. Collective."""
    if not is_initialized():
        return state
    tensors: list[Tensor] = []

    def described(tensor: Tensor) -> _OfRank0:
        if isinstance(tensor, DTensor):
            raise TypeError("broadcast_from_rank0 takes whole tensors, and got a DTensor on rank 0")
        tensors.append(tensor)
        return _OfRank0(tuple(tensor.shape), tensor.dtype)

    told: list[Any] = [None]
    failure: Exception | None = None
    if get_rank() == 0:
        try:
            told = [_mapped(dict(state), described)]
        except TypeError as error:
            failure, told = error, [str(error)]
    broadcast_object_list(told, 0)
    if failure is not None:
        raise failure
    if isinstance(told[0], str):
        raise TypeError(f"rank 0: {told[0]}")
    if get_rank() != 0:
        return told[0]  # type: ignore[no-any-return]
    return _mapped(  # type: ignore[no-any-return]
        dict(state), lambda tensor: _OfRank0(tuple(tensor.shape), tensor.dtype, tensor)
    )
