"""The adjoint of a redistribution: the redistribution that gradients take on the way back.

docs/algorithms/redistribution.md derives the adjoint. It follows from the two layouts alone, and
this module only computes it; ``redistribute`` runs it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilework.dtensor.spec import NONLINEAR, DTensorSpec, Ints
from tilework.layout import Partial, Placement, Replicate


class Adjoint:
    """The redistribution that turns the result's gradient into the gradient of the tensor.

    The gradient of a partial tensor is, on each rank, the derivative of the loss by the rank's
    partial value. For a sum or a mean it is the same on all ranks. For other reductions it differs
    by rank, and all ranks' gradients add up to the gradient of the reduced value.

    Args:
        source: The layout of the tensor.
        target: The layout of the result.
    """

    def __init__(self, source: DTensorSpec, target: DTensorSpec) -> None:
        lengths = source.mesh.shape
        changes = [
            (axis, had, gets)
            for axis, (had, gets) in enumerate(
                zip(source.placements, target.placements, strict=True)
            )
            if lengths[axis] > 1
        ]
        #: The axes along which the redistribution reduces, and along which it makes partial values.
        self.reduced: Ints = tuple(
            [axis for axis, had, gets in changes if isinstance(had, Partial) and had != gets]
        )
        self.filled: Ints = tuple(
            [axis for axis, had, gets in changes if isinstance(gets, Partial) and had != gets]
        )
        kept = [axis for axis, had, gets in changes if isinstance(had, Partial) and had == gets]
        self.op = str(source.reduce_op) if self.reduced else ""
        filled_op = str(target.reduce_op) if self.filled else ""
        own = kept if source.reduce_op in NONLINEAR else []
        #: The layouts between which the gradient moves, from ``target`` to ``source``.
        self.target = _of_gradient(target, [*own, *(self.filled if filled_op in NONLINEAR else ())])
        self.source = _of_gradient(source, own)
        copies = math.prod(lengths[axis] for axis in self.filled) if filled_op == "avg" else 1
        addends = math.prod(lengths[axis] for axis in self.reduced) if self.op == "avg" else 1
        #: The factor of the gradient.
        self.factor = copies / addends
        #: True if this rank holds a constant, and only the first rank holds the value.
        self.masked = filled_op == "product" and not target.is_first(self.filled)
        #: True if the adjoint depends on the tensor's values.
        self.nonlinear = self.op in NONLINEAR


def _of_gradient(spec: DTensorSpec, own: Sequence[int]) -> DTensorSpec:
    """The layout of a gradient: the tensor's, but partial axes are replicated or partial sums.

    Args:
        spec: The tensor's layout.
        own: The axes along which each rank has a different gradient, and which stay partial.
    """
    placements: list[Placement] = [
        (Partial() if axis in own else Replicate()) if isinstance(placement, Partial) else placement
        for axis, placement in enumerate(spec.placements)
    ]
    return spec.with_placements(placements, spec.order)
