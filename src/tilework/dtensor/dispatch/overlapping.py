"""Writes to tensors of which several elements are one in memory, as expanded and unfolded ones."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilework.dtensor.propagation.pytree import Args, Kwargs, tensors_in, with_tensors
from tilework.dtensor.provenance.digests import digest_of
from tilework.dtensor.provenance.meaning import moving
from tilework.dtensor.tensor import DTensor
from tilework.dtensor.views import copied_views

#: torch writes one number, or by index, where elements repeat; else it refuses.
_WRITE_REPEATED = frozenset({"fill", "zero", "masked_fill", "index_fill", "put_at", "index_put"})


def check_writable(name: str, target: Tensor) -> None:
    """Raise, as torch does, if an operator would write to a tensor whose elements repeat. Local.

    On every rank: of local tensors only those of some ranks may have several elements.
    """
    if isinstance(target, DTensor) and target._spec.repeats and name not in _WRITE_REPEATED:
        raise RuntimeError(
            f"{name} writes to a tensor of shape {list(target.shape)} and strides "
            f"{list(target._spec.strides)}: more than one element of it refers to a single place "
            f"in memory, as expand() makes them: clone() it first"
        )


def is_window(name: str, target: Any) -> bool:
    """True if an operator is to write to a view of which several elements are one in memory.

    Its local tensor does not show which, where they had to move or are partial.

    Raises:
        RuntimeError: The operator may not write to it.
    """
    if target.__class__ is not DTensor or not target._spec.overlaps:
        return False
    check_writable(name, target)
    return target._viewed is not None


def write_in_memory(name: str, func: Any, args: Args, kwargs: Kwargs) -> DTensor:
    """The first argument, a view, that an operator has written to. Collective.

    It is written where torch would write, in the full memory, in torch's order.
    """
    target: DTensor = args[0]
    with moving(digest_of(target), name):
        tensors = tensors_in([*args[1:], *kwargs.values()])
        full = [x.full_tensor() if isinstance(x, DTensor) else x for x in tensors]
        its_args, its_kwargs = with_tensors(args[1:], kwargs, iter(full))
        copied_views.write_overlapping(target, lambda shown: func(shown, *its_args, **its_kwargs))
    return target
