"""Which function runs for a torch operator on sharded tensors. The only registry."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tilework.sharded.specs import ShardingSpec

#: ``handler(types, args, kwargs, process_group)``: what __torch_function__ gets, and the group.
Handler = Callable[[Any, Any, Any, Any], Any]
HandlerT = TypeVar("HandlerT", bound=Handler)

_custom: dict[Callable[..., Any], Handler] = {}
_by_spec: dict[tuple[type[ShardingSpec], Callable[..., Any]], Handler] = {}
_own: dict[Callable[..., Any], Handler] = {}


def find_handler(func: Callable[..., Any], spec: ShardingSpec) -> Handler | None:
    """The user's function for ``func``, else the one for this kind of spec, else our own."""
    found = _custom.get(func)
    if found is None:
        found = _by_spec.get((type(spec), func))
    return _own.get(func) if found is None else found


def install(handlers: Mapping[Callable[..., Any], Handler]) -> None:
    """Add our own operators."""
    _own.update(handlers)


def custom_sharded_op_impl(func: Callable[..., Any]) -> Callable[[HandlerT], HandlerT]:
    """Decorates the function that runs for the torch operator ``func`` on sharded tensors.

    It is called with ``(types, args, kwargs, process_group)`` on each rank and goes before
    everything else that is known of ``func``. Process-wide.

    Raises:
        TypeError: The function does not take these four.

    Example:
        >>> import torch
        >>> @custom_sharded_op_impl(torch.special.entr)
        ... def entr(types, args, kwargs, process_group):
        ...     return torch.special.entr(args[0].local_tensor())
    """
    return _registers(_custom, func)


def custom_sharding_spec_op(
    sharding_spec_class: type[ShardingSpec], func: Callable[..., Any]
) -> Callable[[HandlerT], HandlerT]:
    """As :func:`custom_sharded_op_impl`, for tensors with this kind of spec only.

    Raises:
        TypeError: The function does not take ``(types, args, kwargs, process_group)``.

    Example:
        >>> import torch
        >>> from tilework.sharded import EnumerableShardingSpec
        >>> @custom_sharding_spec_op(EnumerableShardingSpec, torch.special.entr)
        ... def entr(types, args, kwargs, process_group):
        ...     return [torch.special.entr(shard.tensor) for shard in args[0].local_shards()]
    """
    return _registers(_by_spec, (sharding_spec_class, func))


def _registers(table: dict[Any, Handler], key: Any) -> Callable[[HandlerT], HandlerT]:
    def register(handler: HandlerT) -> HandlerT:
        _check_signature(handler)
        table[key] = handler
        return handler

    return register


def _check_signature(handler: Callable[..., Any]) -> None:
    signature = inspect.signature(handler)
    try:
        signature.bind(*[None] * 4)
        fits = len(signature.parameters) == 4 or any(
            p.kind is p.VAR_POSITIONAL for p in signature.parameters.values()
        )
    except TypeError:
        fits = False
    if not fits:
        raise TypeError(
            f"Custom sharded op function expects signature "
            f"(types, args, kwargs, process_group), but {handler.__qualname__} has {signature}"
        )
