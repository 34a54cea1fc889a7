"""Rules of users' own operators."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tilework.dtensor.base import forget_handler
from tilework.tiled import Pattern, RuleResult, match_pattern, override_rule, packet_of, schemas_of


def register_rule(
    operator: Callable[..., Any],
    text: str,
    *,
    linear: Sequence[Sequence[int]] = (),
    addends: Sequence[int] = (),
    reduce_ops: Mapping[str, str | None] | None = None,
    added: Sequence[int] = (),
) -> None:
    """Register the sharding rule of an operator of your own, in a line.

    ``operator`` is ``torch.ops.mylib.op``, or a Python function that calls
    ``torch.overrides.has_torch_function``. The operator runs on the local shards of the tensors, as
    the line says; gradients follow from the same line. A rule for a torch function replaces the
    library's rule.

    Args:
        operator: The operator, as the program calls it.
        text: The loops that the dims of each tensor argument and result run over:
            ``"b* i, o i -> b* o"``. ``b*`` stands for any number of dims, ``i!`` for a dim that
            each rank needs unsharded, a tensor that ends in ``?`` for an argument that may be
            None. Dims with the same name are sharded together; a name that no result has is summed
            over.
        linear: Sets of arguments (by place) in which the operator is linear, so that partial sums
            may pass through it.
        addends: Arguments (by place) that are added to a sum over a name that no result has. If
            such a dim is sharded, only one rank adds them.
        reduce_ops: For names that no result has: ``"sum"``, ``"max"``, ``"min"``, ``"product"``, or
            None if such a dim must not be sharded.
        added: Another name of ``addends``.

    Raises:
        ValueError: The text is not a line of this form.

    Example:
        >>> import torch
        >>> from tilework.dtensor import Shard, distribute_tensor, init_device_mesh, register_rule
        >>> from tilework.testing import run_ranks
        >>> @torch.library.custom_op("docs::scaled_rows", mutates_args=())
        ... def scaled_rows(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ...     return x * scale[:, None]
        >>> register_rule(torch.ops.docs.scaled_rows, "row column, row -> row column")
        >>> def program(rank):
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     x = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
        ...     scale = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        ...     return torch.ops.docs.scaled_rows(x, scale).placements
        >>> run_ranks(2, program)[0]
        (Shard(dim=0),)
    """
    pattern = Pattern.parse(text, reduce_ops)
    parameters = _parameters(operator)

    def pattern_result(*args: Any, **kwargs: Any) -> RuleResult:
        by_name = [kwargs.get(name) for name in parameters[len(args) :]]
        tensors = [*args, *by_name][: len(pattern.inputs)]
        tensors += [None] * (len(pattern.inputs) - len(tensors))
        return match_pattern(
            pattern,
            tensors,
            linear=[[tensors[i] for i in places] for places in linear],
            addends=[tensors[i] for i in (*addends, *added)],
        )

    override_rule(operator, pattern_result)
    forget_handler(operator)


def _parameters(operator: Callable[..., Any]) -> list[str]:
    """The names of the operator's parameters, in the order that the line counts them in."""
    schemas = schemas_of(packet_of(operator))
    if schemas:
        return [parameter.name for parameter in schemas[0].arguments]
    try:
        return [*inspect.signature(operator).parameters]
    except ValueError:  # a function in C++ without a text signature
        return []
