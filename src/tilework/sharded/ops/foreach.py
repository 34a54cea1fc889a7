"""torch._foreach_*, as optimizers call them: the operator on each tensor of the lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilework.comm.contract import ReduceOp
from tilework.comm.operations.internal import all_reduce
from tilework.comm.world import NonMember
from tilework.sharded.ops.tiles import graph_tiles
from tilework.sharded.registry import Handler
from tilework.sharded.tensor import ShardedTensor


def _each(operator: Callable[..., Any]) -> Handler:
    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> list[Any]:
        results = []
        for i in range(len(args[0])):
            options = {name: _item(value, i) for name, value in kwargs.items()}
            results.append(operator(*(_item(value, i) for value in args), **options))
        return results

    return handler


def _item(value: Any, i: int) -> Any:
    """The item of a list; a single value is the same for all."""
    return value[i] if isinstance(value, list | tuple) else value


def _addc(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``addcmul`` or ``addcdiv``, where the factor is positional in the form for lists."""

    def run(x: Tensor, a: Tensor, b: Tensor, value: float = 1) -> Tensor:
        return operator(x, a, b, value=value)

    return run


def _in_place(operator: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The in-place form of an operator that has none."""

    def run(x: Tensor, *args: Any) -> Tensor:
        return x.copy_(operator(x, *args))

    return run


def _operator(name: str) -> Callable[..., Any] | None:
    """The operator on one tensor; None if torch has no method of this name."""
    method: Any = getattr(Tensor, name, None)
    if name.startswith("addc"):
        return _addc(method)
    if method is None and name.endswith("_"):
        new_result = getattr(Tensor, name[:-1], None)
        return new_result and _in_place(new_result)
    return method  # type: ignore[no-any-return]


def family(func: Callable[..., Any], name: str, in_place: bool) -> Handler | None:
    """The handler of an operator on lists."""
    of_lists: str = getattr(func, "__name__", "")
    if not of_lists.startswith("_foreach_"):
        return None
    operator = _operator(of_lists.removeprefix("_foreach_"))
    return None if operator is None else _each(operator)


def _unscale(types: Any, args: Any, kwargs: Any, process_group: Any) -> None:
    """Unscale gradients in place, as ``GradScaler`` does. Collective over the gradients' groups.

    If a rank finds infinity or NaN, ``found_inf`` is set on all ranks.
    """
    grads, found_inf, scale = args
    sharded = [grad for grad in grads if isinstance(grad, ShardedTensor)]
    local = [grad for grad in grads if not isinstance(grad, ShardedTensor)]
    local += [tile for grad in sharded for tile in graph_tiles(grad)]
    torch._amp_foreach_non_finite_check_and_unscale_(local, found_inf, scale)
    for group in dict.fromkeys(grad.process_group for grad in sharded):
        if not isinstance(group, NonMember):
            all_reduce(found_inf, ReduceOp.MAX, group)


TABLE: dict[Callable[..., Any], Handler] = {
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
}
