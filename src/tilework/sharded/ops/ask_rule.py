"""The operator table's rules, asked about calls with sharded tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

import tilework.tiled.rules  # noqa: F401  # fills the operator table
from tilework.sharded.tensor import ShardedTensor
from tilework.tiled import Arg, LocalCall, entry_of


def local_call(
    name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> LocalCall | None:
    """The factor map of a call, by the operator's rule; None if the rule gives none.

    Args:
        name: The operator.
        func: The called function of torch.
        args: The positional arguments, with sharded tensors.
        kwargs: The keyword arguments, without sharded tensors.

    Raises:
        Exception: Raised by torch, as it refuses the arguments.
    """
    rule = entry_of(name).rule
    leaves, form = pytree.tree_flatten(tuple(args))
    tensors = [leaf for leaf in leaves if isinstance(leaf, ShardedTensor)]

    def replaced(others: Sequence[Any]) -> Any:
        """The arguments with ``others`` in place of sharded tensors."""
        rest = iter(others)
        here = [next(rest) if isinstance(leaf, ShardedTensor) else leaf for leaf in leaves]
        return pytree.tree_unflatten(here, form)

    known = [Arg(n, tuple(x.shape), x.dtype, frozenset()) for n, x in enumerate(tensors)]
    try:
        call = rule and rule(*replaced(known), **kwargs)
    except TypeError:  # arguments that the rule does not know
        call = None
    if isinstance(call, LocalCall):
        return call
    metas = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in tensors]
    func(*replaced(metas), **kwargs)
    return None


def static_key(value: Any) -> Hashable:
    """Arguments as a key; a bool differs from the number that it equals."""
    if isinstance(value, dict):
        return tuple((name, static_key(item)) for name, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(static_key, value))
    return value.__class__, value
