"""Rules of users' own operators, as torch writes them: lists of placements along one mesh axis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from tilework.dtensor.base import forget_handler
from tilework.layout import Partial, Shard
from tilework.layout.internal import native_placement
from tilework.tiled import Arg, Factor, RuleResult, local_call, override_rule

#: The placement of each result, and of each argument, along one axis; None for no tensor.
_Acceptable = tuple[Sequence[Any], Sequence[Any]]


def register_sharding(op: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator of a function that lists the placements with which an operator can run.

    DTensor calls the function with the operator's arguments; for tensors it passes objects with
    ``shape``, ``ndim`` and ``dtype``. The function returns a list of pairs. A pair is a way to run
    the operator along one mesh axis: the placements of the results, and the placements of the
    arguments, with None for arguments that are not tensors. DTensor may also replicate all tensors.

    If two pairs shard the same dim, only the first counts.
    :func:`~tilework.dtensor.register_rule` takes the same rule as a line of text.

    Args:
        op: An operator of ``torch.ops``, with or without the name of an overload, or several
            operators. The operator needs an implementation for meta tensors
            (``torch.library.register_fake``).

    Example:
        >>> import torch
        >>> from tilework.dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
        >>> from tilework.dtensor import register_sharding
        >>> from tilework.testing import run_ranks
        >>> @torch.library.custom_op("docs::sorted_rows", mutates_args=())
        ... def sorted_rows(x: torch.Tensor) -> torch.Tensor:
        ...     return x.sort(dim=1).values
        >>> @sorted_rows.register_fake
        ... def _(x):
        ...     return torch.empty_like(x)
        >>> @register_sharding(torch.ops.docs.sorted_rows.default)
        ... def by_rows(x):
        ...     return [([Shard(0)], [Shard(0)])]
        >>> def program(rank):
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     x = distribute_tensor(torch.tensor([[2, 1], [4, 3]]), mesh, [Shard(0)])
        ...     y = torch.ops.docs.sorted_rows(x)
        ...     return y.placements, y.to_local().tolist()
        >>> run_ranks(2, program)
        [((Shard(dim=0),), [[1, 2]]), ((Shard(dim=0),), [[3, 4]])]
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for each in op if isinstance(op, list | tuple) else (op,):
            for called in _ways_to_call(each):
                override_rule(called, _rule(each, function))
                forget_handler(called)
        return function

    return register


def _ways_to_call(operator: Any) -> list[Any]:
    """All objects by which a program may call an operator: its overloads and name."""
    if isinstance(operator, torch._ops.OpOverload):
        packet = operator.overloadpacket
        return [operator, packet] if packet.default is operator else [operator]
    if isinstance(operator, torch._ops.OpOverloadPacket):
        names: Any = operator.overloads()  # type: ignore[no-untyped-call]
        return [operator, *(getattr(operator, name) for name in names)]
    return [operator]


def _rule(operator: Any, function: Callable[..., Any]) -> Callable[..., RuleResult]:
    def rule(*args: Any, **kwargs: Any) -> RuleResult:
        outputs = _outputs(operator, args, kwargs)
        ways = _Ways(list(_leaves(args)), outputs)
        for outs, ins in function(*args, **kwargs):
            ways.add(_placements(outs), _placements(ins))
        return local_call(ways.dims, ways.out_dims, linear=ways.linear)

    return rule


class _Ways:
    """Collects the acceptable placements of a call as factors: dims that are sharded together."""

    def __init__(self, args: Sequence[Any], outputs: Sequence[torch.Tensor]) -> None:
        self._args = args
        self._out_shapes = [tuple(output.shape) for output in outputs]
        self.dims: dict[Arg, list[Factor | None]] = {
            arg: [None] * arg.ndim for arg in args if isinstance(arg, Arg)
        }
        self.out_dims: list[list[Factor | None]] = [[None] * len(s) for s in self._out_shapes]
        self.linear: list[list[Arg]] = []

    def add(self, outs: Sequence[Any], ins: Sequence[Any]) -> None:
        """Add one way, unless an earlier way shards one of the same dims differently."""
        pairs = list(zip(self._args, ins, strict=False))
        partial = {arg: place for arg, place in pairs if isinstance(place, Partial)}
        if partial:
            if all(map(_is_sum, (*outs, *partial.values()))):
                self.linear.append([*partial])
            return
        inputs = [
            (place, self.dims[arg], arg.shape) for arg, place in pairs if isinstance(place, Shard)
        ]
        results = zip(outs, self.out_dims, self._out_shapes, strict=False)
        sharded = [
            (factors, shape, place.dim % len(shape))
            for place, factors, shape in (*inputs, *results)
            if isinstance(place, Shard)
        ]
        sizes = {shape[dim] for _, shape, dim in sharded}
        taken = any(factors[dim] is not None for factors, _, dim in sharded)
        reductions = {out.reduce_op for out in outs if isinstance(out, Partial)}
        if not inputs or len(sizes) != 1 or taken or len(reductions) > 1:
            return
        factor = Factor(sizes.pop(), reduce_op=next(iter(reductions), None))
        for factors, _, dim in sharded:
            factors[dim] = factor


def _is_sum(placement: Any) -> bool:
    return isinstance(placement, Partial) and placement.reduce_op == "sum"


def _placements(placements: Iterable[Any]) -> list[Any]:
    return [None if each is None else native_placement(each) for each in placements]


def _leaves(args: Any) -> Iterable[Any]:
    for arg in args:
        if isinstance(arg, list | tuple) and any(isinstance(each, Arg) for each in arg):
            yield from arg
        else:
            yield arg


def _outputs(operator: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The operator's results, as meta tensors."""

    def on_meta(value: Any) -> Any:
        if isinstance(value, Arg):
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        return [*map(on_meta, value)] if isinstance(value, list | tuple) else value

    try:
        result = operator(*on_meta(args), **{key: on_meta(kwargs[key]) for key in kwargs})
    except RuntimeError as error:  # NotImplementedError is a subclass
        raise NotImplementedError(
            f"register_sharding needs the shapes of the results of {operator}: give the operator "
            f"an implementation for meta tensors, with torch.library.register_fake"
        ) from error
    return [result] if isinstance(result, torch.Tensor) else list(result)
