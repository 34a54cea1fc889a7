"""Rules of DTensors that know specs: a DTensor as an argument, and calls with given specs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilework.dtensor.spec import DTensorSpec, Ints
from tilework.layout import Shard
from tilework.tiled import Arg, OpCall


class DTensorArg(Arg):
    """A tensor argument of a call, as an operator's rule for DTensors gets it: with the layout.

    A plain tensor counts as replicated.
    """

    __slots__ = ("spec",)

    def __init__(self, number: int, spec: DTensorSpec, dtype: torch.dtype) -> None:
        sharded_dims = frozenset(
            placement.dim
            for placement, length in zip(spec.placements, spec.mesh.shape, strict=True)
            if isinstance(placement, Shard) and length > 1
        )
        super().__init__(number, spec.shape, dtype, sharded_dims)
        self.spec = spec

    @property
    def layout(self) -> DTensorSpec:
        return self.spec


@dataclass(frozen=True, eq=False)
class PlacedCall(OpCall):
    """A call that runs on local tensors of given specs, and gives results of given specs.

    Args:
        inputs: The spec that each tensor is redistributed to.
        outputs: The spec of each tensor of the result.
        run: Called with the local tensors, in order.
        partial_grads: The axes along which the gradient of each tensor is partial; (): none.
        write: Of a view for which ``run`` moves elements: writes the view (the second argument) to
            the tensor (the first).
    """

    inputs: Sequence[DTensorSpec]
    outputs: Sequence[DTensorSpec]
    run: Callable[..., Any]
    partial_grads: Sequence[Ints] = ()
    write: Callable[[Any, Any], Any] | None = None
