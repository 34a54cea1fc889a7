"""Optimizers on sharded parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tilework.comm.contract import ProcessGroup
from tilework.comm.world import NonMember
from tilework.sharded.alike import check_alike
from tilework.sharded.optim_check import check_elementwise
from tilework.sharded.optim_state import agreed_entries, joined, parts
from tilework.sharded.relayout import layout_of
from tilework.sharded.specs import ShardingSpec
from tilework.sharded.tensor import ShardedTensor

_GRADIENT = "gradient"


def named_params_with_sharded_tensor(
    module: nn.Module, prefix: str = "", recurse: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """A module's parameters, and its sharded tensors that are plain attributes; each once.

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


class ShardedOptimizer(Optimizer):
    """An optimizer of torch's on this rank's shards of sharded parameters, and on plain ones.

    Steps are local: each rank updates its shards. State is known by the names of parameters, and
    :meth:`state_dict` gives it as sharded tensors, cut as the parameters are: it can be saved,
    resharded, and loaded at any other layout.

    It works with what takes a torch.optim.Optimizer (``torch.optim.lr_scheduler``, say).

    Args:
        named_params: Name to parameter, as a mapping or as pairs; or several groups, each a dict
            with these as ``"params"``, and options of its own. A rank may hold no shards of them.
        optimizer_class: A subclass of torch.optim.Optimizer that treats each element on its own
            (SGD, Adam, …). That is tried, on a small tensor.
        args: Its arguments after the parameters.
        kwargs: Likewise.

    Raises:
        TypeError: ``optimizer_class`` is none, or a parameter is no tensor.
        ValueError: The optimizer does not treat each element on its own (LBFGS, Muon, Adafactor),
            or there are no parameters, or one comes twice.

    Example:
        >>> import torch
        >>> from tilework.sharded import ChunkShardingSpec, ShardedOptimizer, ones
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     weight = ones(ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), 3)
        ...     optimizer = ShardedOptimizer({"weight": weight}, torch.optim.SGD, lr=0.5)
        ...     for tile in weight.local_tiles():
        ...         tile.grad = torch.ones_like(tile)
        ...     optimizer.step()
        ...     return weight.local_tensor().tolist()
        >>> run_ranks(2, program)
        [[0.5, 0.5], [0.5]]
    """

    def __init__(
        self,
        named_params: Mapping[str, Tensor]
        | Iterable[tuple[str, Tensor]]
        | Iterable[Mapping[str, Any]],
        optimizer_class: type[Optimizer],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        groups = _groups(named_params)
        tensors = [tensor for group in groups for tensor in group["params"].values()]
        device = tensors[0].device if tensors else torch.device("cpu")
        check_elementwise(optimizer_class, args, kwargs, device)
        #: All parameters, by name.
        self.named_params: dict[str, Tensor] = {}
        self._names: list[list[str]] = []  # of each parameter group
        self._tiles: dict[str, list[Tensor]] = {}  # what the inner one has
        self._make = partial(_made, optimizer_class, args, kwargs)
        self._inner: Optimizer | None = None
        super().__init__(groups, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own.

        Args:
            param_group: ``"params"`` maps names to parameters; the rest are options.

        Raises:
            TypeError: A parameter is no tensor.
            ValueError: A name or a parameter is there already.
        """
        param_group = _named(param_group)
        named = param_group["params"]
        known = {id(tensor): name for name, tensor in self.named_params.items()}
        for name, tensor in named.items():
            if not isinstance(tensor, Tensor):
                raise TypeError(f"parameter {name!r} must be a tensor, got {type(tensor).__name__}")
            if name in self.named_params or id(tensor) in known:
                raise ValueError(
                    f"parameter {name!r} is there already"
                    + (f", as {known[id(tensor)]!r}" if id(tensor) in known else "")
                )
            known[id(tensor)] = name
        tiles = {name: _local(tensor) for name, tensor in named.items()}
        local = {**param_group, "params": [tile for own in tiles.values() for tile in own]}
        if self._inner is None:
            self._inner = self._make([local])
        else:
            self._inner.add_param_group(local)
        self.named_params.update(named)
        self._names.append(list(named))
        self._tiles.update(tiles)
        self._adopt()

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))  # torch's would leave out the parameters

    def _adopt(self) -> None:
        inner = self._of_torch()
        self.defaults, self.state, self.param_groups = (
            inner.defaults,
            inner.state,
            inner.param_groups,
        )

    def _of_torch(self) -> Optimizer:
        assert self._inner is not None
        return self._inner

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this rank's shards from their gradients. Local; not collective.

        Args:
            closure: Computes the loss and the gradients anew, on all ranks if that is collective.

        Returns:
            What ``closure`` returned.

        Raises:
            RuntimeError: A parameter was resharded without :meth:`reshard_`.
        """
        self._check_tiles()
        return self._of_torch().step(closure)

    def state_dict(self) -> dict[str, Any]:
        """The state by names of parameters.

        Collective over the groups of sharded parameters; blocks.

        Returns:
            ``"state"``: for each parameter what the optimizer keeps for it; of a sharded one
            tensors of its size are sharded tensors, cut as it is. ``"param_groups"``: each group's
            options, and the names of its parameters as ``"params"``. The tensors are the
            optimizer's own, not copies.

        Raises:
            RuntimeError: Some shards of a parameter had gradients where others had none.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._check_tiles()
        entries = self._entries(self._by_process_group())
        state = {
            name: joined(tensor, self._states(name), entries.get(name, {}))
            if isinstance(tensor, ShardedTensor)
            else dict(self._states(name)[0])
            for name, tensor in self.named_params.items()
        }
        groups = [
            {**options, "params": list(names)}
            for options, names in zip(self.param_groups, self._names, strict=True)
        ]
        found: dict[str, Any] = {"state": state, "param_groups": groups}
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, found)
            found = found if changed is None else changed
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over the state of another optimizer of the same parameters, as a copy.

        Collective over the groups of sharded parameters; blocks. What is wrong on one rank raises
        on all, and the state is as it was.

        Args:
            state_dict: From :meth:`state_dict`; the same on every rank but for the shards. Its
                sharded tensors may have any layout on ranks of their parameters' groups, or be
                plain tensors that every rank has whole.

        Raises:
            ValueError: It has other parameters or groups, or values of another size.
        """
        saved = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, saved)
            saved = saved if changed is None else changed
        self._check_tiles()
        for group, own_names in self._by_process_group().items():
            check_alike(lambda names=own_names: self._loaded_layouts(saved, names), group)  # type: ignore[misc]
        options = self._matching_groups(saved)
        states = [
            state
            for names in self._names
            for name in names
            for state in self._loaded(name, saved["state"].get(name, {}))
        ]
        inner, first = self._of_torch(), 0
        for group_options, own in zip(options, inner.param_groups, strict=True):
            n = len(own["params"])
            group_options["params"] = list(range(first, first + n))
            first += n
        inner.load_state_dict({"state": dict(enumerate(states)), "param_groups": options})
        self._adopt()
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def reshard_(self, name: str, resharding_spec: ShardingSpec) -> None:
        """Cut a parameter anew, in place, and with it its state and its gradient.

        Collective over the parameter's group; blocks. If it raises, all is as it was.

        Args:
            name: The parameter's name, the same on all ranks; it is sharded.
            resharding_spec: Any whose placements are on ranks of its group.

        Raises:
            KeyError: There is no parameter of that name.
            ValueError: It is a plain one, or the spec does not fit.
        """
        self._check_tiles()
        if name not in self.named_params:
            raise KeyError(f"no parameter {name!r}; there are {', '.join(self.named_params)}")
        tensor = self.named_params[name]
        if not isinstance(tensor, ShardedTensor):
            raise ValueError(f"parameter {name!r} is a plain tensor: see shard_parameter")
        group, gradients = tensor.process_group, self._states(name, gradient=True)
        entries = {}
        if not isinstance(group, NonMember):
            shards = list(zip(self._tiles[name], gradients, strict=True))
            entries = agreed_entries({name: shards}, group).get(name, {})
        whole = joined(tensor, gradients, entries)
        moved = {
            key: copy.copy(value).reshard(resharding_spec)
            if isinstance(value, ShardedTensor)
            else value
            for key, value in sorted(whole.items())
        }
        tensor.reshard(resharding_spec)
        self._exchange(name, tensor, moved)

    def _exchange(self, name: str, tensor: ShardedTensor, whole: Mapping[str, Any]) -> None:
        """Give the inner optimizer new shards for old ones."""
        inner = self._of_torch()
        for tile in self._tiles[name]:
            inner.state.pop(tile, None)
        self._tiles[name] = _local(tensor)
        for tile, state in zip(self._tiles[name], self._loaded(name, whole), strict=True):
            tile.grad = state.pop(_GRADIENT, None)
            if state:
                inner.state[tile] = state
        for names, options in zip(self._names, inner.param_groups, strict=True):
            options["params"][:] = [tile for own in names for tile in self._tiles[own]]

    def _states(self, name: str, gradient: bool = False) -> list[dict[str, Any]]:
        """What is kept for each local tensor of a parameter."""
        kept = self._of_torch().state
        states = [dict(kept.get(tile, {})) for tile in self._tiles[name]]
        if gradient:
            for tile, state in zip(self._tiles[name], states, strict=True):
                if tile.grad is not None:
                    state[_GRADIENT] = tile.grad
        return states

    def _entries(self, groups: Mapping[ProcessGroup, list[str]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for group, names in groups.items():
            shards = {n: list(zip(self._tiles[n], self._states(n), strict=True)) for n in names}
            found.update(agreed_entries(shards, group))
        return found

    def _by_process_group(self) -> dict[ProcessGroup, list[str]]:
        """The sharded parameters whose group this rank is in."""
        found: dict[ProcessGroup, list[str]] = {}
        for name, tensor in self.named_params.items():
            if isinstance(tensor, ShardedTensor):
                group = tensor.process_group
                if not isinstance(group, NonMember):
                    found.setdefault(group, []).append(name)
        return found

    def _check_tiles(self) -> None:
        for name, tensor in self.named_params.items():
            known, now = self._tiles[name], _local(tensor)
            if len(known) != len(now) or any(a is not b for a, b in zip(known, now, strict=True)):
                raise RuntimeError(
                    f"the shards of parameter {name!r} are not those that this optimizer was made "
                    f"with, so it would update nothing: use its reshard_({name!r}, spec), or make "
                    f"a new one"
                )

    def _matching_groups(self, saved: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The saved options of each group, in the order of the own groups."""
        theirs = {frozenset(group["params"]): group for group in saved["param_groups"]}
        found = []
        for names in self._names:
            if frozenset(names) not in theirs:
                raise ValueError(
                    f"the saved state has no group of the parameters {names}; its groups are "
                    f"{[list(group['params']) for group in saved['param_groups']]}"
                )
            found.append(dict(theirs[frozenset(names)]))
        if len(theirs) != len(found):
            raise ValueError(
                f"the saved state has {len(theirs)} groups of parameters, this optimizer "
                f"{len(found)}"
            )
        return found

    def _loaded_layouts(self, saved: Mapping[str, Any], names: list[str]) -> dict[str, str]:
        """What is about to become the state of these parameters."""
        self._matching_groups(saved)
        found: dict[str, str] = {}
        for name in names:
            for key, value in saved["state"].get(name, {}).items():
                found[f"{name}: {key}"] = layout_of(value)
                self._check_size(name, key, value)
        return found

    def _check_size(self, name: str, key: str, value: Any) -> None:
        tensor = self.named_params[name]
        if isinstance(value, ShardedTensor) and value.shape != tensor.shape:
            raise ValueError(
                f"the saved state {key!r} of parameter {name!r} has size {tuple(value.shape)}, the "
                f"parameter {tuple(tensor.shape)}"
            )

    def _loaded(self, name: str, saved: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The state of each local tensor of a parameter."""
        tensor = self.named_params[name]
        states: list[dict[str, Any]] = [{} for _ in self._tiles[name]]
        for key in sorted(saved):  # in one order on all ranks
            for state, part in zip(states, parts(saved[key], tensor), strict=True):
                state[key] = part
        return states


def _made(
    optimizer_class: Callable[..., Optimizer],
    args: tuple[Any, ...],
    options: dict[str, Any],
    groups: list[dict[str, Any]],
) -> Optimizer:
    return optimizer_class(groups, *args, **options)


def _local(tensor: Tensor) -> list[Tensor]:
    return list(tensor.local_tiles()) if isinstance(tensor, ShardedTensor) else [tensor]


def _groups(named_params: Any) -> list[dict[str, Any]]:
    """As groups, each with its parameters by name."""
    given = named_params if isinstance(named_params, Mapping) else list(named_params)
    if not given:
        raise ValueError("the optimizer has no parameters: give it named_parameters() of a module")
    several = not isinstance(given, Mapping) and isinstance(given[0], Mapping)
    return [_named(group) for group in (given if several else [{"params": given}])]


def _named(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group with its parameters by name."""
    params = group["params"]
    pairs = list(params.items() if isinstance(params, Mapping) else params)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise TypeError("parameters must have names: give pairs, such as named_parameters()")
    for name, tensor in pairs:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"parameter {name!r} must be a tensor, got {type(tensor).__name__}")
    if len(dict(pairs)) != len(pairs):
        raise ValueError(f"two parameters have one name: {[name for name, _ in pairs]}")
    return {**group, "params": dict(pairs)}
