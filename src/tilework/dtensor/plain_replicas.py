"""Comparison of plain tensors that must be the same on all ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup
from tilework.comm.operations.internal import agree, broadcast, device_of
from tilework.comm.per_call.internal import unrecorded
from tilework.dtensor.provenance.content import hash_of
from tilework.errors import CollectiveMismatchError

#: The differences between replicas that count as rounding, relative to the largest value.
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4, torch.complex128: 1e-8}
_COARSE = 2e-2
#: The most elements that are exchanged in one message.
_CHUNK = 1 << 22

#: Two group ranks, and an element that they should have in common as each of the two has it.
Difference = tuple[tuple[int, int], tuple[Any, Any]]


def content_of(tensors: Sequence[Tensor], full: bool) -> int:
    """A hash of the elements of tensors; if not ``full``, of a sample of each large one. Local."""
    return hash(tuple([hash_of(tensor, full) for tensor in tensors]))


@unrecorded
@torch.no_grad()
def difference_from_first(tensor: Tensor, group: ProcessGroup) -> Difference | None:
    """Compare all elements with the group's first rank. Collective over the group; blocks.

    Args:
        tensor: A plain tensor, of one shape and dtype on all ranks of the group.
        group: The ranks that should have the same elements.

    Returns:
        The first element that differs on this rank by more than rounding; None if there is none.
    """
    mine = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
    found: Difference | None = None
    for chunk in torch.split(mine, _CHUNK):
        first = chunk.to(device_of(group)).clone()
        broadcast(first.view(torch.uint8), group=group, group_src=0)
        if found is None:
            pair = _apart(first.to(chunk.device), chunk)
            found = None if pair is None else ((0, group.rank()), pair)
    return found


def _apart(one: Tensor, other: Tensor) -> tuple[Any, Any] | None:
    """The first pair of elements of two flat tensors that differ by more than rounding, or None."""
    size = one.element_size()
    if one.is_floating_point() or one.is_complex():
        wide = one.dtype if size >= 4 else torch.float32
        x, y = one.to(wide), other.to(wide)
        tolerance, gap = _TOLERANCES.get(one.dtype, _COARSE), (x - y).abs()
        sizes = torch.stack([x.abs(), y.abs()])
        scale = sizes.amax()
        if gap.amax() <= tolerance * scale < torch.inf:
            return None
        scale = sizes.nan_to_num(0.0, posinf=0.0).amax()
        same = (x == y) | (x.isnan() & y.isnan()) | (gap <= tolerance * scale)
    else:
        same = (one.view(torch.uint8) == other.view(torch.uint8)).view(-1, size).all(1)
    if same.all():
        return None
    place = int(same.logical_not().nonzero()[0])
    return one[place].item(), other[place].item()


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
        if len({of_rank[number][2] for of_rank in facts}) == 1:
            continue
        mine = difference_from_first(tensor, group)
        for found in agree(lambda mine=mine: mine, group):  # type: ignore[misc]
            if found is not None:
                (one, other), (x, y) = found
                raise CollectiveMismatchError(
                    f"{name!r} ({_kind(tensor)}) is not the same on all ranks: an element is "
                    f"{x} on rank {ranks[one]} and {y} on rank {ranks[other]}. {advice}",
                    ranks=(ranks[one], ranks[other]),
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
