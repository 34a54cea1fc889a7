"""The meaning of collectives: the tensor and the operator that their header and errors tell."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilework.comm import provenance
from tilework.comm.provenance import OF_A_DTENSOR, carrying
from tilework.dtensor.debug.formatting import layout_text
from tilework.dtensor.provenance.mode import mode
from tilework.dtensor.spec import DTensorSpec


class Meaning:
    """The operator that a collective is for, as the program knows it, and the tensor that moves."""

    operator: str

    __slots__ = ("dtype", "operator", "spec", "target")

    def __init__(
        self,
        operator: str,
        spec: DTensorSpec | None = None,
        dtype: torch.dtype | None = None,
        target: DTensorSpec | None = None,
    ) -> None:
        outer = provenance.meaning()
        if isinstance(outer, Meaning) and outer.operator:
            operator = outer.operator
        self.operator, self.spec, self.dtype, self.target = operator, spec, dtype, target

    def __str__(self) -> str:
        text = f"{self.operator or 'an operator'} {OF_A_DTENSOR}"
        if self.spec is not None and self.dtype is not None:
            text += f" {layout_text(self.spec, self.dtype)}"
            if self.target is not None:
                text += f" to {layout_text(self.target, self.dtype)}"
        return text


def moving(
    digest: int,
    operator: str,
    spec: DTensorSpec | None = None,
    dtype: torch.dtype | None = None,
    target: DTensorSpec | None = None,
) -> carrying:
    """Let collectives meanwhile carry a digest, mixed with that of the operator around them.

    Args:
        digest: That of the tensor, and of where it goes.
        operator: The operator or method, unless one is known already.
        spec: The layout of the tensor.
        dtype: Its dtype.
        target: The layout afterwards.
    """
    carried = 0 if mode() == "off" else hash((digest, provenance.digest()))
    return carrying(carried, Meaning(operator, spec, dtype, target))


def named_for(method: str) -> carrying:
    """Let errors meanwhile name a method that the program has called."""
    return carrying(provenance.digest(), Meaning(method))


class Moved(NamedTuple):
    """A tensor that is about to move, as its local tensor does not tell."""

    #: The provenance digest.
    digest: int = 0
    #: What it moves for: an operator or a method.
    operator: str = ""
    #: True if the program gets the result, maybe as a plain tensor: its gradient then comes from
    #: who knows where, and is in no operator's partial form.
    handed_out: bool = False

    def as_gradient(self, passing: int) -> Moved:
        """Its gradient, in a backward pass of a digest."""
        operator = f"the gradient of {self.operator}" if self.operator else "a gradient"
        return Moved(hash((self.digest, passing)), operator)


#: A tensor of which nothing is known but the operator around.
UNKNOWN = Moved()
