"""An optimizer's state for a sharded parameter: from states of shards to one, and back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilework.comm.agreement import agree
from tilework.comm.contract import ProcessGroup
from tilework.comm.world import get_process_group_ranks
from tilework.sharded.relayout import laid_out_as
from tilework.sharded.tensor import ShardedTensor
from tilework.tiled.local_optimizer import is_per_element

#: What an optimizer keeps for one tensor.
State = Mapping[str, Any]
#: ("shard", dtype): a tensor of the shard's size. Or what is the same for all shards: ("number",
#: (dtype, number)) for a tensor without dims, which then is told quickly; ("value", value).
Entry = tuple[str, Any]


def agreed_entries(
    parameters: Callable[[], Mapping[str, Sequence[tuple[Tensor, State]]]], group: ProcessGroup
) -> dict[str, dict[str, Entry]]:
    """What is kept for each parameter, also on ranks without a shard. Collective; blocks.

    Args:
        parameters: By name, this rank's shards and their states. May raise what is wrong here.
        group: That of the parameters.

    Raises:
        RuntimeError: Shards of one parameter have different entries or values.
        Exception: ``parameters`` raised, here or on another rank.
    """
    said = agree(
        lambda: {name: _of_shards(name, shards) for name, shards in parameters().items()}, group
    )
    found: dict[str, dict[str, Entry]] = {}
    for name in said[0]:
        for rank, theirs in zip(get_process_group_ranks(group), said, strict=True):
            entries = theirs.get(name)
            if entries is not None:
                _check_same(name, found.setdefault(name, entries), entries, f"rank {rank}")
    return found


def _of_shards(name: str, shards: Sequence[tuple[Tensor, State]]) -> dict[str, Entry] | None:
    """What all of a rank's shards have; None if it has none, or only empty ones."""
    # Backward may leave out a shard without elements, which then has no state.
    found = [_entries(tensor, state) for tensor, state in shards if tensor.numel()]
    for entries in found:
        _check_same(name, found[0], entries, "another shard")
    return found[0] if found else None


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


def _check_same(name: str, one: Mapping[str, Entry], two: Mapping[str, Entry], where: str) -> None:
    for key in {*one, *two}:
        if key not in one or key not in two or not _same(one[key], two[key]):
            raise RuntimeError(
                f"the state {key!r} of parameter {name!r} is {one.get(key, 'missing')} for one "
                f"shard and {two.get(key, 'missing')} on {where}: in each step all shards "
                f"must have a gradient, or none"
            )


def _same(one: Entry, two: Entry) -> bool:
    (kind, a), (other, b) = one, two
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return kind == other and type(a) is type(b) and bool(a == b)


def joined(
    parameter: ShardedTensor, states: Sequence[State], entries: Mapping[str, Entry]
) -> dict[str, Any]:
    """The state of the whole parameter: sharded tensors cut as it is, and values. Local.

    They share memory with the shards' states.
    """
    found: dict[str, Any] = {}
    for key, (kind, value) in entries.items():
        if kind != "shard":
            found[key] = states[0][key] if states and key in states[0] else _told(kind, value)
            continue
        dtype = getattr(torch, value)
        tiles = [
            state[key] if key in state else torch.empty_like(tile, dtype=dtype).detach()
            for tile, state in zip(parameter.local_tiles(), states, strict=True)
        ]
        found[key] = parameter.like(tiles, dtype=dtype, requires_grad=False)
    return found


def _told(kind: str, value: Any) -> Any:
    """What another rank told."""
    return torch.tensor(value[1], dtype=getattr(torch, value[0])) if kind == "number" else value


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def parts(value: Any, parameter: Tensor) -> list[Any]:
    """A state of the whole parameter, for each local tensor of it; copies.

    Collective over the parameter's group if ``value`` is sharded otherwise.
    """
    whole = isinstance(value, Tensor) and value.shape == parameter.shape
    if not isinstance(parameter, ShardedTensor):
        return [value.full_tensor() if isinstance(value, ShardedTensor) else copy.deepcopy(value)]
    if whole:
        return [tile.clone() for tile in laid_out_as(value, parameter).local_tiles()]
    return [copy.deepcopy(value) for _ in parameter.local_tiles()]
