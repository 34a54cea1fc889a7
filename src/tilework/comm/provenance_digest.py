"""The provenance that a thread's collectives carry, by which ranks compare tensors.

A *provenance digest* identifies how a tensor was computed. While a thread has set a digest, the
headers of the thread's collectives carry it, beside dtype and shape. So ranks all raise if they
mean different tensors, or tensors whose values have parted. Here digests are numbers that must be
equal on all ranks; ``dtensor.provenance`` says how they are computed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

from tilework.optional_core import core as _core

#: Words in messages for a collective of an operator on DTensors.
OF_A_DTENSOR = "of a DTensor"
_ADVICE = (
    "Operators on DTensors are collective, and so are item(), float(), bool() and print() of their "
    "values, tolist() and full_tensor(): call them on every rank of the mesh, and print on one. If "
    "all ranks came to the same line, they computed from different things: another branch, another "
    "number, or other data in a plain tensor, which counts as replicated along all axes of a mesh. "
    "Where ranks have different rows, say DTensor.from_local(rows, mesh, [Shard(0)]), or "
    "input_layouts=Shard(0) in the plan of parallelize_module, whose modules alone take a plain "
    "input as different rows along the other axes of the mesh. "
    "tilework.dtensor.verify(model) names parameters that have parted. Or the operator may have "
    "raised on another rank alone, for its own part of the data (a target out of range): see that "
    "rank's traceback."
)
_ON_PENALTIES = (
    "To a loss of this rank's own rows, as fully_shard has it, add a penalty on parameters as "
    "penalty.full_tensor()."
)


#: Words in messages for a collective of a pass of a wrapped module.
OF_A_PASS = "after forward pass"
#: Words in messages for a collective of a module of fully_shard.
OF_A_UNIT = "of fully_shard, in"
ADVICE_ON_PASSES = (
    "Modules that average gradients or gather parameters count their forward and backward passes, "
    "and the changes of their parameters in between, and all ranks have to come to the same "
    "counts. Look for a batch, a backward(), step() or zero_grad() that one rank skips or repeats "
    "(loss.isnan(), a shorter data loader, rank == 0). For a forward pass of one rank alone call "
    "the module within (ddp.module) or use torch.no_grad(); for uneven inputs use Join. Modules of "
    "fully_shard have neither: give all ranks equally many batches. A loss of this rank's rows may "
    "use sharded parameters within forward alone: outside they are replicated, with all tensors "
    "beside them. tilework.dtensor.verify(model) names the parameters that have parted."
)

#: Functions of layers above that give more advice on collectives of DTensors; "" for none.
more_advice: list[Callable[[], str]] = []

#: The environment variable for the amount of comparison.
VARIABLE = "TILEWORK_VERIFY"


@cache
def is_off() -> bool:
    """True if TILEWORK_VERIFY=off turns comparisons between ranks off."""
    return os.environ.get(VARIABLE) == "off"


#: The purpose of a thread's collectives: the operator or method ("" if unknown), or an object whose
#: str() is the whole text; the moving tensor, whose str() names it (None if unknown); and the
#: enclosing purpose.
Purpose = tuple[object, object, Any]


class _Carried(threading.local):
    digest = 0
    purpose: Purpose | None = None


_carried = _Carried()


def _set_digest(digest: int) -> int:
    before, _carried.digest = _carried.digest, digest
    return before


def _digest() -> int:
    return _carried.digest


#: Set the digest that collectives of this thread carry (0: none); return the old digest.
set_digest = _set_digest if _core is None else _core.set_provenance
#: The digest that collectives of this thread carry.
digest = _digest if _core is None else _core.provenance


def enter(digest: int, operator: object, tensor: object) -> int:
    """Let this thread's collectives carry a digest; pass the result to :func:`leave`."""
    _carried.purpose = (operator, tensor, _carried.purpose)
    return set_digest(digest)


def leave(before: int) -> None:
    """Restore the digest from before the last :func:`enter`, which returned ``before``."""
    set_digest(before)
    purpose = _carried.purpose
    _carried.purpose = None if purpose is None else purpose[2]


class carrying:
    """Let this thread's collectives carry a digest within a block.

    Args:
        digest: The digest; the same on all ranks that are to call the same collectives.
        operator: The operator or method that calls the collectives, unless an enclosing block names
            one; or an object whose str() is the purpose, for collectives without a DTensor.
        tensor: The tensor that moves; errors name it by str().
    """

    __slots__ = ("before", "digest", "operator", "tensor")

    def __init__(self, digest: int, operator: object = "", tensor: object = None) -> None:
        self.digest, self.operator, self.tensor = digest, operator, tensor

    def __enter__(self) -> None:
        self.before = enter(self.digest, self.operator, self.tensor)

    def __exit__(self, *_: object) -> None:
        leave(self.before)


def named(title: str) -> str:
    """``title``, an operation's title, with words for the purpose that :class:`carrying` set.

    The words name the operator of the outermost block and the tensor of the innermost block.
    Without a purpose, the result is ``title``.
    """
    purpose = _carried.purpose
    operator: object = ""
    tensor: object = None
    while purpose is not None:
        operator = purpose[0] or operator
        tensor = purpose[1] if tensor is None else tensor
        purpose = purpose[2]
    if not isinstance(operator, str):
        return f"{title} for {operator}"
    if not (operator or digest()) and tensor is None:
        return title
    what = "" if tensor is None else f" {tensor}"
    return f"{title} for {operator or 'an operator'} {OF_A_DTENSOR}{what}"


def advice(text: str, has_died: bool = False) -> str:
    """Advice to append to an error's message; "" if there is none, as for collectives that are not
    of DTensors or of passes of wrapped modules. ``has_died``: the failure is the end of another
    rank's process.
    """
    if OF_A_PASS in text or OF_A_UNIT in text:
        more = f" {_ON_PENALTIES}" if OF_A_UNIT in text else ""
        return "" if has_died else f" {ADVICE_ON_PASSES}{more}"
    if OF_A_DTENSOR not in text:
        return ""
    return f"{advice_from_above()} {_ADVICE} {_ON_PENALTIES}"


def advice_from_above() -> str:
    """The advice of layers above, to append to an error's message."""
    return "".join([f" {text}" for each in more_advice if (text := each())])
