"""An optimizer's state of a sharded parameter, converted between local and sharded tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup
from tilework.comm.operations.internal import agree
from tilework.comm.world import get_process_group_ranks
from tilework.models import is_per_element
from tilework.sharded.reshard_like import reshard_like
from tilework.sharded.tensor import ShardedTensor

#: The states of one tensor by name.
State = Mapping[str, Any]
#: ("shard", dtype): a tensor of the shard's size. Or the same value for all shards: ("number",
#: (dtype, number)) for a tensor without dims, which is cheap to send; else ("value", value).
Entry = tuple[str, Any]


def agreed_entries(
    parameters: Callable[[], Mapping[str, Sequence[tuple[Tensor, State]]]], group: ProcessGroup
) -> dict[str, dict[str, Entry]]:
    """The entries, short descriptions, of each parameter's states. Collective; blocks.

    All ranks get the same, also ranks without a shard, which have no states of the parameter.

    Args:
        parameters: Returns, by name, this rank's shards and their states. May raise.
        group: The parameters' group.

    Raises:
        RuntimeError: Shards of one parameter have different entries or values.
        Exception: ``parameters`` raised, here or on another rank.
    """
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
    """The state of the full parameter: tensors sharded like the parameter, and plain values. Local.

    The tensors share memory with ``states``, the states of this rank's shards.
    """
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
    """The value of a state, made from an entry that another rank sent."""
    return torch.tensor(value[1], dtype=getattr(torch, value[0])) if kind == "number" else value


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def local_states(value: Any, parameter: Tensor) -> list[Any]:
    """``value``, a state of the full parameter, as a copy for each local tensor of it.

    Collective over the parameter's group if ``value`` has another sharding.
    """
    if not isinstance(parameter, ShardedTensor):
        return [value.full_tensor() if isinstance(value, ShardedTensor) else copy.deepcopy(value)]
    if isinstance(value, Tensor) and value.shape == parameter.shape:
        return [tile.clone() for tile in reshard_like(value, parameter).local_tiles()]
    return [copy.deepcopy(value) for _ in parameter.local_tiles()]
