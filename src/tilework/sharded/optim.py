"""Optimizers on sharded parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tilework.comm.contract import ProcessGroup
from tilework.comm.operations.internal import agree, agree_equal
from tilework.comm.world import NonMember, get_process_group_ranks
from tilework.models import check_elementwise, is_per_element
from tilework.sharded.moves import describe_value, reshard_like
from tilework.sharded.specs import ShardingSpec
from tilework.sharded.tensor import ShardedTensor

_GRADIENT = "gradient"


class ShardedOptimizer(Optimizer):
    """An optimizer of torch on this rank's shards of sharded parameters, and on plain parameters.

    Steps are local: each rank updates the local shards. State is keyed by the names of parameters.
    :meth:`state_dict` gives it as tensors sharded like the parameters: it can be saved, resharded,
    and loaded in any other layout.

    Code that takes a torch.optim.Optimizer accepts it (``torch.optim.lr_scheduler``, for example):
    ``param_groups`` has the whole parameters. ``torch.amp.GradScaler`` skips a step on all ranks if
    a rank has infinite gradients.

    Args:
        named_params: Name to parameter, as a mapping or as pairs; or several groups, each a dict
            with these as ``"params"``, and with options. A rank may hold no shards of them.
        optimizer_class: A subclass of torch.optim.Optimizer that treats each element separately
            (SGD, Adam, …); a class outside torch is tried on a small tensor.

    Raises:
        TypeError: ``optimizer_class`` is not an optimizer class, or a parameter is not a tensor.
        ValueError: The optimizer does not treat each element separately (LBFGS, Muon, Adafactor),
            there are no parameters, or a parameter is given twice.
    """

    _inner: Optimizer

    def __init__(
        self,
        named_params: Mapping[str, Tensor]
        | Iterable[tuple[str, Tensor]]
        | Iterable[Mapping[str, Any]],
        optimizer_class: type[Optimizer],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        groups = parameter_groups(named_params)
        tensors = [tensor for group in groups for tensor in group["params"].values()]
        device = tensors[0].device if tensors else torch.device("cpu")
        check_elementwise(optimizer_class, args, kwargs, device)
        self.named_params: dict[str, Tensor] = {}
        self._names: list[list[str]] = []  # of each parameter group
        self._tiles: dict[str, list[Tensor]] = {}  # the inner optimizer's tensors
        self._make: Callable[..., Optimizer] = optimizer_class
        self._options = args, kwargs
        super().__init__(groups, {})  # which makes the inner optimizer, with the first group

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with options.

        Args:
            param_group: ``"params"`` maps names to parameters; the rest are options.

        Raises:
            TypeError: A parameter is not a tensor.
            ValueError: A name or a parameter is there already.
        """
        param_group = named_group(param_group)
        named = param_group["params"]
        known = {id(tensor): name for name, tensor in self.named_params.items()}
        for name, tensor in named.items():
            if name in self.named_params or id(tensor) in known:
                raise ValueError(
                    f"parameter {name!r} is there already"
                    + (f", as {known[id(tensor)]!r}" if id(tensor) in known else "")
                )
            known[id(tensor)] = name
        tiles = {name: local_tensors(tensor) for name, tensor in named.items()}
        local = {**param_group, "params": [tile for own in tiles.values() for tile in own]}
        if self._names:
            self._inner.add_param_group(local)
        else:
            args, options = self._options
            self._inner = self._make([local], *args, **options)
        self.named_params.update(named)
        self._names.append(list(named))
        self._tiles.update(tiles)
        self.defaults, self.state = self._inner.defaults, self._inner.state
        self._add_whole_group(list(named), self._inner.param_groups[-1])

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))  # torch's method would leave out the parameters

    def _add_whole_group(self, names: list[str], own: Mapping[str, Any]) -> None:
        params = [self.named_params[name] for name in names]
        self.param_groups.append({**_options(own), "params": params})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's shards from their gradients. Local; not collective.

        Args:
            closure: Computes the loss and the gradients again; on all ranks if that is collective.

        Returns:
            The result of ``closure``.

        Raises:
            RuntimeError: A parameter was resharded without :meth:`reshard_`.
        """
        self._check_tiles()
        groups = list(zip(self.param_groups, self._inner.param_groups, strict=True))
        for group, own in groups:
            own.update(_options(group))  # which a schedule may have changed
        loss = self._inner.step(closure)
        for group, own in groups:
            group.update(_options(own))
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state by names of parameters.

        Collective over the groups of sharded parameters; blocks.

        Returns:
            ``"state"``: each parameter's states; for a sharded parameter, states of the parameter's
            size are sharded in the same way. ``"param_groups"``: each group's options, and the
            names of the parameters as ``"params"``. The tensors belong to the optimizer: they are
            not copies.

        Raises:
            RuntimeError: Some shards of a parameter had gradients where others had none.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        entries = {
            name: of_name
            for group, names in self._by_process_group().items()
            for name, of_name in self._entries(names, group).items()
        }
        state = {
            name: full_state(tensor, self._states(name), entries.get(name, {}))
            if isinstance(tensor, ShardedTensor)
            else dict(self._states(name)[0])
            for name, tensor in self.named_params.items()
        }
        groups = [
            {**options, "params": list(names)}
            for options, names in zip(self.param_groups, self._names, strict=True)
        ]
        saved: dict[str, Any] = {"state": state, "param_groups": groups}
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, saved)
            saved = saved if changed is None else changed
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the state of another optimizer of the same parameters, as a copy.

        Collective over the groups of sharded parameters; blocks. An error on one rank raises on
        all ranks, and the state does not change.

        Args:
            state_dict: From :meth:`state_dict`; the same on every rank except for the shards.
                Sharded tensors may have any layout on ranks of the parameters' groups. Plain
                tensors are the same on every rank.

        Raises:
            ValueError: The state has other parameters or groups, or values of another size.
        """
        saved = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, saved)
            saved = saved if changed is None else changed
        for group, own_names in self._by_process_group().items():
            agree_equal(lambda names=own_names: self._loaded_layouts(saved, names), group)  # type: ignore[misc]
        options = self._matching_groups(saved)
        states = [
            state
            for names in self._names
            for name in names
            for state in self._loaded(name, saved["state"].get(name, {}))
        ]
        inner, first = self._inner, 0
        for group_options, own in zip(options, inner.param_groups, strict=True):
            n = len(own["params"])
            group_options["params"] = list(range(first, first + n))
            first += n
        inner.load_state_dict({"state": dict(enumerate(states)), "param_groups": options})
        self.state, self.param_groups = inner.state, []
        for names, own in zip(self._names, inner.param_groups, strict=True):
            self._add_whole_group(names, own)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def reshard_(self, name: str, resharding_spec: ShardingSpec) -> None:
        """Reshard a parameter in place, with state and gradient.

        Collective over the parameter's group; blocks. If it raises, nothing has changed.

        Args:
            name: The parameter's name, the same on all ranks; it is sharded.
            resharding_spec: Any spec whose placements are on ranks of the parameter's group.

        Raises:
            KeyError: There is no parameter of that name.
            ValueError: The parameter is a plain tensor, or the spec does not fit.
        """
        if name not in self.named_params:
            raise KeyError(f"no parameter {name!r}; there are {', '.join(self.named_params)}")
        tensor = self.named_params[name]
        if not isinstance(tensor, ShardedTensor):
            raise ValueError(
                f"reshard_ moves the shards of a sharded parameter, but {name!r} is a plain "
                f"tensor: shard it first with shard_parameter"
            )
        group, entries = tensor.process_group, {}
        if not isinstance(group, NonMember):
            entries = self._entries([name], group, gradients=True).get(name, {})
        moved = full_state(tensor, self._states(name, gradients=True), entries)
        for key, value in sorted(moved.items()):  # in the same order on all ranks
            if isinstance(value, ShardedTensor):
                moved[key] = copy.copy(value).reshard(resharding_spec)
        tensor.reshard(resharding_spec)
        self._replace_tiles(name, tensor, moved)

    def _replace_tiles(self, name: str, tensor: ShardedTensor, full: Mapping[str, Any]) -> None:
        inner = self._inner
        for tile in self._tiles[name]:
            inner.state.pop(tile, None)
        self._tiles[name] = local_tensors(tensor)
        for i, tile in enumerate(self._tiles[name]):
            state = {
                key: value.local_tiles()[i]
                if isinstance(value, ShardedTensor)
                else copy.deepcopy(value)
                for key, value in full.items()
            }
            tile.grad = state.pop(_GRADIENT, None)
            if state:
                inner.state[tile] = state
        for names, options in zip(self._names, inner.param_groups, strict=True):
            options["params"][:] = [tile for own in names for tile in self._tiles[own]]

    def _states(self, name: str, gradients: bool = False) -> list[dict[str, Any]]:
        """The optimizer's states of each local tensor of a parameter; on request with gradients."""
        kept = self._inner.state
        states = [dict(kept.get(tile, {})) for tile in self._tiles[name]]
        if gradients:
            for tile, state in zip(self._tiles[name], states, strict=True):
                if tile.grad is not None:
                    state[_GRADIENT] = tile.grad
        return states

    def _entries(
        self, names: list[str], group: ProcessGroup, gradients: bool = False
    ) -> dict[str, dict[str, Entry]]:
        def shards() -> dict[str, list[tuple[Tensor, State]]]:
            self._check_tiles()
            return {
                name: list(zip(self._tiles[name], self._states(name, gradients), strict=True))
                for name in names
            }

        return agreed_entries(shards, group)

    def _by_process_group(self) -> dict[ProcessGroup, list[str]]:
        """The names of sharded parameters by process group; only groups that this rank is in."""
        by_group: dict[ProcessGroup, list[str]] = {}
        for name, tensor in self.named_params.items():
            if isinstance(tensor, ShardedTensor):
                group = tensor.process_group
                if not isinstance(group, NonMember):
                    by_group.setdefault(group, []).append(name)
        return by_group

    def _check_tiles(self) -> None:
        for name, tensor in self.named_params.items():
            known, now = self._tiles[name], local_tensors(tensor)
            if len(known) != len(now) or any(a is not b for a, b in zip(known, now, strict=True)):
                raise RuntimeError(
                    f"the shards of parameter {name!r} were replaced after the optimizer was made: "
                    f"it would update nothing; reshard by the optimizer's reshard_({name!r}, spec) "
                    f"or make a new optimizer"
                )

    def _matching_groups(self, saved: Mapping[str, Any]) -> list[dict[str, Any]]:
        theirs = {frozenset(group["params"]): group for group in saved["param_groups"]}
        matching = []
        for names in self._names:
            if frozenset(names) not in theirs:
                raise ValueError(
                    f"the saved state has no group of the parameters {names}; its groups are "
                    f"{[list(group['params']) for group in saved['param_groups']]}"
                )
            matching.append(dict(theirs[frozenset(names)]))
        if len(theirs) != len(matching):
            raise ValueError(
                f"the saved state has {len(theirs)} groups of parameters, this optimizer "
                f"{len(matching)}"
            )
        return matching

    def _loaded_layouts(self, saved: Mapping[str, Any], names: list[str]) -> dict[str, str]:
        """Texts on the saved states of these parameters, for ranks to compare before they load."""
        self._check_tiles()
        self._matching_groups(saved)
        layouts: dict[str, str] = {}
        for name in names:
            for key, value in saved["state"].get(name, {}).items():
                layouts[f"{name}: {key}"] = describe_value(value)
                shape = self.named_params[name].shape
                if isinstance(value, ShardedTensor) and value.shape != shape:
                    raise ValueError(
                        f"the saved state {key!r} of parameter {name!r} has size "
                        f"{tuple(value.shape)}, the parameter {tuple(shape)}"
                    )
        return layouts

    def _loaded(self, name: str, saved: Mapping[str, Any]) -> list[dict[str, Any]]:
        tensor = self.named_params[name]
        states: list[dict[str, Any]] = [{} for _ in self._tiles[name]]
        for key in sorted(saved):  # in the same order on all ranks
            for state, local in zip(states, local_states(saved[key], tensor), strict=True):
                state[key] = local
        return states


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


# -- parameters --------------------------------------------------------------------------------


def named_params_with_sharded_tensor(
    module: nn.Module, prefix: str = "", recurse: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """A module's parameters, and the sharded tensors that are plain attributes; each once.

    Example:
        >>> import torch
        >>> from tilework.sharded import named_params_with_sharded_tensor
        >>> [name for name, _ in named_params_with_sharded_tensor(torch.nn.Linear(2, 2))]
        ['weight', 'bias']
    """
    seen: set[int] = set()
    for path, submodule in module.named_modules(prefix=prefix) if recurse else [(prefix, module)]:
        for name, value in vars(submodule).items():
            if isinstance(value, ShardedTensor) and id(value) not in seen:
                seen.add(id(value))
                yield f"{path}.{name}" if path else name, value
    for name, parameter in module.named_parameters(prefix=prefix, recurse=recurse):
        if id(parameter) not in seen:
            yield name, parameter


def local_tensors(tensor: Tensor) -> list[Tensor]:
    """This rank's tiles of a sharded parameter; for a plain parameter a list of itself."""
    return list(tensor.local_tiles()) if isinstance(tensor, ShardedTensor) else [tensor]


def parameter_groups(named_params: Any) -> list[dict[str, Any]]:
    """``named_params`` as a list of parameter groups, each with a dict of named parameters."""
    listed = named_params if isinstance(named_params, Mapping) else list(named_params)
    if not listed:
        raise ValueError("the optimizer has no parameters: give it named_parameters() of a module")
    grouped = not isinstance(listed, Mapping) and isinstance(listed[0], Mapping)
    return [named_group(group) for group in (listed if grouped else [{"params": listed}])]


def named_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """``group`` with the value of ``params`` as a dict from names to parameters, after a check."""
    params = group["params"]
    pairs = list(params.items() if isinstance(params, Mapping) else params)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise TypeError("parameters must have names: give pairs, such as named_parameters()")
    for name, tensor in pairs:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"parameter {name!r} must be a tensor, got {type(tensor).__name__}")
    if len(dict(pairs)) != len(pairs):
        raise ValueError(f"two parameters have the same name: {[name for name, _ in pairs]}")
    return {**group, "params": dict(pairs)}


# -- the state of a sharded parameter, as local and as sharded tensors -------------------------


State = Mapping[str, Any]
#: ("shard", dtype): a tensor of the shard's size. Or the same value for all shards: ("number",
#: (dtype, number)) for a tensor without dims, which is cheap to send; else ("value", value).
Entry = tuple[str, Any]


def agreed_entries(
    parameters: Callable[[], Mapping[str, Sequence[tuple[Tensor, State]]]], group: ProcessGroup
) -> dict[str, dict[str, Entry]]:
    """Short descriptions of each parameter's states, also on ranks without any. Collective."""
    by_rank = agree(
        lambda: {name: _of_shards(name, shards) for name, shards in parameters().items()}, group
    )
    agreed: dict[str, dict[str, Entry]] = {}
    for name in by_rank[0]:
        for rank, theirs in zip(get_process_group_ranks(group), by_rank, strict=True):
            entries = theirs.get(name)
            if entries is not None:
                _check_same(name, agreed.setdefault(name, entries), entries, f"rank {rank}")
    return agreed


def _of_shards(name: str, shards: Sequence[tuple[Tensor, State]]) -> dict[str, Entry] | None:
    """The entries common to this rank's shards; None if there are no shards, or all are empty."""
    # Backward may skip a shard without elements: it then has no state.
    by_shard = [_entries(tensor, state) for tensor, state in shards if tensor.numel()]
    for entries in by_shard:
        _check_same(name, by_shard[0], entries, "another shard")
    return by_shard[0] if by_shard else None


def _entries(tensor: Tensor, state: State) -> dict[str, Entry]:
    def entry(key: str, value: Any) -> Entry:
        if not isinstance(value, Tensor):
            return "value", value
        if is_per_element(key, value, tensor):
            return "shard", _name(value.dtype)
        if value.dim() == 0:
            return "number", (_name(value.dtype), value.item())
        return "value", value.detach().cpu()

    return {key: entry(key, value) for key, value in state.items()}


def _check_same(
    name: str, first: Mapping[str, Entry], other: Mapping[str, Entry], where: str
) -> None:
    for key in {*first, *other}:
        if key not in first or key not in other or not _same(first[key], other[key]):
            raise RuntimeError(
                f"the state {key!r} of parameter {name!r} is {first.get(key, 'missing')} for one "
                f"shard and {other.get(key, 'missing')} on {where}: in each step all shards "
                f"must have a gradient, or none"
            )


def _same(first: Entry, other: Entry) -> bool:
    (kind, a), (other_kind, b) = first, other
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return kind == other_kind and type(a) is type(b) and bool(a == b)


def full_state(
    parameter: ShardedTensor, states: Sequence[State], entries: Mapping[str, Entry]
) -> dict[str, Any]:
    """The state of the full parameter: plain values, and tensors sharded like the parameter."""
    state: dict[str, Any] = {}
    for key, (kind, value) in entries.items():
        if kind != "shard":
            state[key] = states[0][key] if states and key in states[0] else _received(kind, value)
            continue
        dtype = getattr(torch, value)
        tiles = [
            local[key] if key in local else torch.empty_like(tile, dtype=dtype).detach()
            for tile, local in zip(parameter.local_tiles(), states, strict=True)
        ]
        state[key] = parameter.like(tiles, dtype=dtype, requires_grad=False)
    return state


def _received(kind: str, value: Any) -> Any:
    return torch.tensor(value[1], dtype=getattr(torch, value[0])) if kind == "number" else value


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def local_states(value: Any, parameter: Tensor) -> list[Any]:
    """A copy of a full parameter's state for each local tensor. Collective if it must move."""
    if not isinstance(parameter, ShardedTensor):
        return [value.full_tensor() if isinstance(value, ShardedTensor) else copy.deepcopy(value)]
    if isinstance(value, Tensor) and value.shape == parameter.shape:
        return [tile.clone() for tile in reshard_like(value, parameter).local_tiles()]
    return [copy.deepcopy(value) for _ in parameter.local_tiles()]
