"""Comparison of plain tensors that must be the same on all ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilework.comm.agreement import agree
from tilework.comm.contract import ProcessGroup
from tilework.dtensor.provenance.content import hash_of, sample
from tilework.errors import CollectiveMismatchError

#: The differences between replicas that count as rounding, relative to the largest value.
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4, torch.complex128: 1e-8}
_COARSE = 2e-2
_SHOWN = 256


def content_of(tensors: Sequence[Tensor], full: bool) -> int:
    """A hash of the elements of tensors; if not ``full``, of a sample of each large one. Local."""
    return hash(tuple([hash_of(tensor, full) for tensor in tensors]))


def shown(tensor: Tensor) -> list[Any]:
    """Up to ``_SHOWN`` elements of a tensor, as numbers, for :func:`apart`; none on meta."""
    return [] if tensor.is_meta else sample(tensor.detach(), _SHOWN).cpu().tolist()


def apart(one: Sequence[Any], other: Sequence[Any], dtype: torch.dtype) -> tuple[Any, Any] | None:
    """The first pair of :func:`shown` elements that differ by more than rounding, or None."""
    tolerance = _TOLERANCES.get(dtype, _COARSE if dtype.is_floating_point else 0)
    scale = max((abs(x) for x in (*one, *other) if x == x), default=0)
    for x, y in zip(one, other, strict=True):
        if x != y and not (x != x and y != y) and not abs(x - y) <= tolerance * scale:
            return x, y
    return None


def compare_plain(
    tensors: Sequence[tuple[str, Tensor]], group: ProcessGroup, *, full: bool, advice: str
) -> None:
    """Raise unless all ranks have the same plain tensors, up to rounding. Collective; blocks.

    Args:
        tensors: This rank's tensors, with their names.
        group: The ranks to compare.
        full: True to hash all elements; False: only a sample of large tensors.
        advice: The last sentence of the error: what to look for.

    Raises:
        CollectiveMismatchError: Names, shapes, dtypes or elements differ; on every rank. The
            message names the first tensor that differs, and two ranks.
    """
    facts: list[list[tuple[str, str, int]]] = agree(
        lambda: [(name, _kind(tensor), hash_of(tensor.detach(), full)) for name, tensor in tensors],
        group,
    )
    ranks = group.global_ranks
    for place, theirs in enumerate(facts):
        if [fact[:2] for fact in theirs] != [fact[:2] for fact in facts[0]]:
            raise _other_tensors(ranks[0], facts[0], ranks[place], theirs, advice)
    for number, (name, tensor) in enumerate(tensors):
        hashes = [of_rank[number][2] for of_rank in facts]
        if len(set(hashes)) == 1:
            continue
        values = agree(lambda tensor=tensor: shown(tensor), group)  # type: ignore[misc]
        for place, theirs in enumerate(values):
            pair = apart(values[0], theirs, tensor.dtype)
            if pair is not None:
                raise CollectiveMismatchError(
                    f"{name!r} ({_kind(tensor)}) is not the same on all ranks: an element is "
                    f"{pair[0]} on rank {ranks[0]} and {pair[1]} on rank {ranks[place]}. {advice}",
                    ranks=(ranks[0], ranks[place]),
                )


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype)[6:]} {list(tensor.shape)}"


def _other_tensors(
    first: int,
    mine: Sequence[tuple[str, str, int]],
    rank: int,
    theirs: Sequence[tuple[str, str, int]],
    advice: str,
) -> CollectiveMismatchError:
    for (name, kind, _), (other, other_kind, _) in zip(mine, theirs, strict=False):
        if (name, kind) != (other, other_kind):
            what = f"rank {first} has {name!r} ({kind}) where rank {rank} has {other!r} "
            return CollectiveMismatchError(f"{what}({other_kind}). {advice}", ranks=(first, rank))
    return CollectiveMismatchError(
        f"rank {first} has {len(mine)} tensors and rank {rank} has {len(theirs)}. {advice}",
        ranks=(first, rank),
    )
