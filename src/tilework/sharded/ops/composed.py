"""Functions composed of other operators: losses, comparisons, torch.nn.init, lists of tensors.

Comparisons give the same answer on every rank. Random numbers come from each rank's own generator,
tile by tile: ranks with the same seed fill their tiles with the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn import init

from tilework.comm.contract import ReduceOp
from tilework.comm.operations.internal import agree, all_reduce
from tilework.comm.world import NonMember
from tilework.sharded.checks import unsupported
from tilework.sharded.ops.by_tile import elementwise
from tilework.sharded.ops.tiles import graph_tiles, same_layout
from tilework.sharded.registry import Handler
from tilework.sharded.tensor import ShardedTensor


def _loss(func: Callable[..., Any]) -> Handler:
    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        reduction = kwargs.get("reduction", "mean")
        averages = [kwargs.get(name) for name in ("size_average", "reduce")]
        if reduction not in ("none", "mean", "sum") or averages != [None, None]:
            raise unsupported(func, args, kwargs, "reduction is 'none', 'mean' or 'sum'")
        each = elementwise(func)(types, args, {**kwargs, "reduction": "none"}, process_group)
        return each if reduction == "none" else getattr(each, reduction)()

    return handler


_LOSSES: list[Callable[..., Any]] = [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.soft_margin_loss,
    F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.kl_div]  # fmt: skip


# -- comparisons -------------------------------------------------------------------------------


_COMPARISONS: list[Callable[..., bool]] = [
    torch.equal, Tensor.equal, torch.allclose, Tensor.allclose,
]  # fmt: skip


def _compares(func: Callable[..., bool]) -> Handler:
    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> bool:
        a, b = args[0], args[1] if len(args) > 1 else kwargs["other"]
        if not (isinstance(a, ShardedTensor) and isinstance(b, ShardedTensor)):
            raise unsupported(
                func, args, kwargs, "both must be sharded: shard_tensor shards a plain one"
            )
        if a.process_group is not b.process_group:
            raise unsupported(func, args, kwargs, "both must be on one process group")
        others = {k: v for k, v in kwargs.items() if k not in ("input", "self", "other")}
        if a.shape != b.shape:
            if func in (torch.equal, Tensor.equal):
                return False
            raise unsupported(func, args, kwargs, "both must have one shape")
        if not same_layout(a, b):
            detached: Any = b.detach()
            b = detached.reshard(a.sharding_spec())
        tiles = zip(graph_tiles(a), graph_tiles(b), strict=True)

        def same_here() -> bool:
            return all(func(tile, other, *args[2:], **others) for tile, other in tiles)

        if isinstance(a.process_group, NonMember):
            return same_here()  # this rank has no tiles
        return all(agree(same_here, a.process_group))

    return handler


# -- torch.nn.init -----------------------------------------------------------------------------


def _fills(fill: Callable[..., Tensor]) -> Handler:
    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Tensor:
        with torch.no_grad():
            return fill(*args, **kwargs)

    return handler


def _kaiming_uniform(
    tensor: Tensor,
    a: float = 0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    generator: torch.Generator | None = None,
) -> Tensor:
    fan = init._calculate_correct_fan(tensor, mode)  # type: ignore[arg-type]
    gain = init.calculate_gain(nonlinearity, a)  # type: ignore[arg-type]
    bound = gain * math.sqrt(3 / fan)
    return tensor.uniform_(-bound, bound, generator=generator)


# -- torch._foreach_*, as optimizers call them -------------------------------------------------


def _each(operator: Callable[..., Any]) -> Handler:
    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> list[Any]:
        results = []
        for i in range(len(args[0])):
            options = {name: _item(value, i) for name, value in kwargs.items()}
            results.append(operator(*(_item(value, i) for value in args), **options))
        return results

    return handler


def _item(value: Any, i: int) -> Any:
    return value[i] if isinstance(value, list | tuple) else value


def _operator(name: str) -> Callable[..., Any] | None:
    method: Any = getattr(Tensor, name, None)
    if name.startswith("addc"):  # the factor is positional in the form for lists
        return lambda x, a, b, value=1: method(x, a, b, value=value)
    if method is None and (of_name := getattr(Tensor, name.removesuffix("_"), None)):
        return lambda x, *args: x.copy_(of_name(x, *args))
    return method  # type: ignore[no-any-return]


def family(func: Callable[..., Any], name: str, in_place: bool) -> Handler | None:
    """The handler of an operator on lists."""
    of_lists: str = getattr(func, "__name__", "")
    if not of_lists.startswith("_foreach_"):
        return None
    operator = _operator(of_lists.removeprefix("_foreach_"))
    return None if operator is None else _each(operator)


def _unscale(types: Any, args: Any, kwargs: Any, process_group: Any) -> None:
    """Unscale gradients as ``GradScaler`` does; all ranks get ``found_inf``. Collective."""
    grads, found_inf, scale = args
    sharded = [grad for grad in grads if isinstance(grad, ShardedTensor)]
    local = [grad for grad in grads if not isinstance(grad, ShardedTensor)]
    local += [tile for grad in sharded for tile in graph_tiles(grad)]
    torch._amp_foreach_non_finite_check_and_unscale_(local, found_inf, scale)
    for group in dict.fromkeys(grad.process_group for grad in sharded):
        if not isinstance(group, NonMember):
            all_reduce(found_inf, ReduceOp.MAX, group)


TABLE: dict[Callable[..., Any], Handler] = {
    **{func: _loss(func) for func in _LOSSES},
    **{func: _compares(func) for func in _COMPARISONS},
    init.uniform_: _fills(
        lambda tensor, a=0.0, b=1.0, generator=None: tensor.uniform_(a, b, generator=generator)
    ),
    init.normal_: _fills(
        lambda tensor, mean=0.0, std=1.0, generator=None: tensor.normal_(
            mean, std, generator=generator
        )
    ),
    init.constant_: _fills(lambda tensor, val: tensor.fill_(val)),
    init.kaiming_uniform_: _fills(_kaiming_uniform),
    torch._amp_foreach_non_finite_check_and_unscale_: _unscale,
}
