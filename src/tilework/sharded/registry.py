"""The handler of each torch function on sharded tensors: the user's, or else the built-in one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tilework.models import original as original_init
from tilework.sharded.specs import ShardingSpec
from tilework.tiled import canonical_name

#: ``handler(types, args, kwargs, process_group)``: what __torch_function__ gets, and the group.
Handler = Callable[[Any, Any, Any, Any], Any]
HandlerT = TypeVar("HandlerT", bound=Handler)
#: Called with a torch function, the canonical name, and whether this form writes to the first
#: argument. Makes the handler if the function belongs to the family, else returns None.
Family = Callable[[Callable[..., Any], str, bool], Handler | None]

_custom: dict[Callable[..., Any], Handler] = {}
_by_spec: dict[tuple[type[ShardingSpec], Callable[..., Any]], Handler] = {}
_own: dict[Callable[..., Any], Handler] = {}
_families: list[Family] = []


def find_handler(func: Callable[..., Any], spec: ShardingSpec) -> Handler | None:
    """The user's function for ``func``, else the spec's handler, else the built-in one."""
    handler = _custom.get(func)
    if handler is None:
        handler = _by_spec.get((type(spec), func))
    if handler is None:
        handler = _own.get(func)
    if handler is None and (of_torch := original_init(func)) is not func:
        return find_handler(of_torch, spec)
    return _by_family(func) if handler is None else handler


def _by_family(func: Callable[..., Any]) -> Handler | None:
    """Find a family that makes the built-in handler of ``func``, and keep it; None if none does."""
    name, in_place = canonical_name(func)
    for family in _families:
        handler = family(func, name, in_place)
        if handler is not None:
            _own[func] = handler
            return handler
    return None


def install(handlers: Mapping[Callable[..., Any], Handler], families: Sequence[Family]) -> None:
    """Add the built-in operators: a handler for each function, and families in this order."""
    _own.update(handlers)
    _families.extend(families)


def custom_sharded_op_impl(func: Callable[..., Any]) -> Callable[[HandlerT], HandlerT]:
    """Decorates the function that runs for the torch operator ``func`` on sharded tensors.

    It is called with ``(types, args, kwargs, process_group)`` on each rank, and overrides every
    other handler of ``func``. Process-wide.

    Raises:
        TypeError: The function does not take these four arguments.

    Example:
        >>> import torch
        >>> @custom_sharded_op_impl(torch.special.entr)
        ... def entr(types, args, kwargs, process_group):
        ...     return torch.special.entr(args[0].local_tensor())
    """
    return _register(_custom, func)


def custom_sharding_spec_op(
    sharding_spec_class: type[ShardingSpec], func: Callable[..., Any]
) -> Callable[[HandlerT], HandlerT]:
    """:func:`custom_sharded_op_impl` only for tensors with this kind of spec.

    Raises:
        TypeError: The function does not take ``(types, args, kwargs, process_group)``.

    Example: see :func:`custom_sharded_op_impl`.
    """
    return _register(_by_spec, (sharding_spec_class, func))


def _register(table: dict[Any, Handler], key: Any) -> Callable[[HandlerT], HandlerT]:
    def add(handler: HandlerT) -> HandlerT:
        _check_signature(handler)
        table[key] = handler
        return handler

    return add


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
