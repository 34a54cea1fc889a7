"""Collectives carry the digest and the text of the tensor and operator that they run for."""

from __future__ import annotations

from functools import cache

import torch

from tilework.comm import provenance_digest
from tilework.comm.provenance_digest import carrying
from tilework.dtensor.debug.formatting import layout_text
from tilework.dtensor.provenance.content import mode
from tilework.dtensor.provenance.digests import stable_digest
from tilework.dtensor.spec import DTensorSpec


class TensorText:
    """The text of a tensor that moves, made only when an error needs it.

    Args:
        spec: The layout.
        dtype: The dtype.
        target: The layout afterwards; None: unknown.
    """

    __slots__ = ("dtype", "spec", "target")

    def __init__(
        self, spec: DTensorSpec, dtype: torch.dtype, target: DTensorSpec | None = None
    ) -> None:
        self.spec, self.dtype, self.target = spec, dtype, target

    def __str__(self) -> str:
        text = layout_text(self.spec, self.dtype)
        return text if self.target is None else f"{text} to {layout_text(self.target, self.dtype)}"


def carried(digest: int) -> int:
    """The digest for collectives: of a tensor, mixed with the surrounding operator's; 0 if off."""
    return 0 if mode() == "off" else hash((digest, provenance_digest.digest()))


def moving(digest: int, operator: str, tensor: TensorText | None = None) -> carrying:
    """A context in which collectives carry a digest, mixed with the surrounding operator's.

    Args:
        digest: The digest of the tensor, and of the layout that it moves to.
        operator: The operator or method for errors; a surrounding operator has precedence.
        tensor: The text of the tensor for errors.
    """
    return carrying(carried(digest), operator, tensor)


def agreeing(method: str) -> carrying:
    """A context in which ranks agree on the arguments of a method: headers and errors name it."""
    return moving(_digest_of_name(method), method)


_digest_of_name = cache(stable_digest)


def named_for(method: str) -> carrying:
    """A context in which errors of collectives name a method that the program has called."""
    return carrying(provenance_digest.digest(), method)


class Moved:
    """Facts about a tensor that is about to move between ranks: where it comes from, and why.

    Args:
        digest: The provenance digest.
        operator: The operator or method that it moves for.
        handed_out: True if the program gets the result, maybe as a plain tensor. Then the gradient
            may come from any code, and no operator has made it partial.
    """

    __slots__ = ("digest", "handed_out", "operator")

    def __init__(self, digest: int = 0, operator: str = "", handed_out: bool = False) -> None:
        self.digest, self.operator, self.handed_out = digest, operator, handed_out

    def as_gradient(self, passing: int) -> Moved:
        """The facts about the tensor's gradient, in a backward pass with the digest ``passing``."""
        operator = f"the gradient of {self.operator}" if self.operator else "a gradient"
        return Moved(hash((self.digest, passing)), operator)


#: A tensor of which nothing is known but the operator around.
UNKNOWN = Moved()
