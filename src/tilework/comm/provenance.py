"""The provenance that a thread's collectives carry: what tensors they mean, for ranks to compare.

A *provenance digest* tells how a tensor came about. It is in the header of the collectives that a
thread calls while it is set, beside dtype and shape, so that ranks which mean different tensors, or
tensors whose values have parted, all raise. Here digests are numbers that must be equal on all
ranks; ``dtensor.provenance`` says what they are made of.
"""

from __future__ import annotations

import threading
from types import TracebackType

try:
    from tilework import _core
except ImportError:  # installed without the core
    _core = None  # type: ignore[assignment]

#: The words by which messages tell that a collective is that of an operator on DTensors.
OF_A_DTENSOR = "of a DTensor"
_ADVICE = (
    "Operators on DTensors are collective, and so are item(), float(), bool() and print() of their "
    "values, tolist() and full_tensor(): call them on every rank of the mesh, and print on one. If "
    "all ranks came to the same line, what they computed from differs: other data in a plain "
    "tensor, another branch, another number. tilework.dtensor.verify(model) tells which parameters "
    "have parted."
)


class _Carried(threading.local):
    digest = 0
    #: Describes the tensor by its str().
    meaning: object = None


_carried = _Carried()


def _set_digest(digest: int) -> int:
    before, _carried.digest = _carried.digest, digest
    return before


def _digest() -> int:
    return _carried.digest


#: Set the digest that collectives of this thread carry (0: none); returns the one before.
set_digest = _set_digest if _core is None else _core.set_provenance
#: The digest that collectives of this thread carry.
digest = _digest if _core is None else _core.provenance


class carrying:
    """Let this thread's collectives carry a digest meanwhile.

    Args:
        digest: The digest; the same on all ranks that are to call the same collectives.
        meaning: Its str() names the tensor in errors.

    Example:
        >>> import torch
        >>> import tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     try:
        ...         with carrying(rank + 1, "of mine"):
        ...             dist.all_reduce(torch.zeros(1))
        ...     except dist.CollectiveMismatchError:
        ...         return "they mean different tensors"
        >>> run_ranks(2, program)[0]
        'they mean different tensors'
    """

    __slots__ = ("before", "digest", "meaning", "meant")

    def __init__(self, digest: int, meaning: object = None) -> None:
        self.digest, self.meaning = digest, meaning

    def __enter__(self) -> None:
        self.before, self.meant = set_digest(self.digest), _carried.meaning
        _carried.meaning = self.meaning

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        set_digest(self.before)
        _carried.meaning = self.meant


def meaning() -> object:
    """The description of the tensor of this thread's collectives; None if there is none."""
    return _carried.meaning


def named(title: str) -> str:
    """An operation's title, with the tensor that it is for."""
    meaning = _carried.meaning
    return title if meaning is None else f"{title} for {meaning}"


def advice(text: str) -> str:
    """The next step after a failure that ``text`` tells of; "" if it is not about DTensors."""
    return f" {_ADVICE}" if OF_A_DTENSOR in text else ""
