"""Comparison of what must be equal on several ranks: parts of DTensors, and plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup
from tilework.comm.operations.internal import agree, all_gather_into_tensor, broadcast, device_of
from tilework.comm.per_call.internal import call_site, unrecorded
from tilework.dtensor.base import DTensorBase
from tilework.dtensor.provenance.content import content_digest, hash_of, mode
from tilework.dtensor.provenance.digests import call_counts_of, digest_of
from tilework.dtensor.spec import DTensorSpec, Ints
from tilework.errors import CollectiveMismatchError


def compare_replicas(local: Tensor, spec: DTensorSpec) -> None:
    """Raise on every rank of the mesh if ranks that must hold the same part hold different values,
    as far as the mode says.

    Collective over the mesh, if some axis replicates. Called for tensors that other axes shard: the
    digests of later collectives cannot contain the values, since they differ between shards. For
    tensors that all axes replicate, digests contain the values, and no comparison is needed.
    """
    if not _is_compared(local):
        return
    first = first_replicas(spec)
    if first != tuple(range(len(first))):
        group = spec.mesh.axes_group(range(spec.mesh.ndim))
        _compare(local, group, first, "the same part of a tensor with placements", spec)


def compare_gradients(grad: Tensor, spec: DTensorSpec) -> None:
    """:func:`compare_replicas` for a gradient. Collective over the axes that replicate only."""
    axes = [a for a, p in enumerate(spec.placements) if p.is_replicate() and spec.mesh.shape[a] > 1]
    if axes and _is_compared(grad):
        group = spec.mesh.axes_group(axes)
        _compare(
            grad, group, (0,) * group.size(), "the same gradient of a tensor with placements", spec
        )


def _is_compared(local: Tensor) -> bool:
    how = mode()
    return how != "off" and (local.is_cpu or how == "full")


def _compare(
    local: Tensor, group: ProcessGroup, first: Sequence[int], what: str, spec: DTensorSpec
) -> None:
    row = torch.tensor([content_digest(local) >> 1], device=device_of(group))
    rows = row.new_empty(group.size())
    all_gather_into_tensor(rows, row, group)
    contents = rows.tolist()
    for rank, its_first in enumerate(first):
        if contents[rank] != contents[its_first]:
            pair = group.global_ranks[its_first], group.global_ranks[rank]
            raise CollectiveMismatchError(
                f"ranks {pair[0]} and {pair[1]} are to have {what} {list(spec.placements)}, but "
                f"their values differ{_here()}: give the ranks of an axis that replicates the same "
                f"values, or say with the placements how they differ",
                ranks=pair,
            )


def _here() -> str:
    site = call_site()
    return f", at {site}" if site else ""


@lru_cache(maxsize=512)
def first_replicas(spec: DTensorSpec) -> Ints:
    """For each group rank of the mesh, the first group rank that has the same part."""
    first: dict[Ints, int] = {}
    found = []
    mesh = spec.mesh
    for number, rank in enumerate(mesh.axes_group(range(mesh.ndim)).global_ranks):
        coordinate = mesh.spec.coordinate(rank)
        assert coordinate is not None
        part = tuple(
            0 if placement.is_replicate() else place
            for placement, place in zip(spec.placements, coordinate, strict=True)
        )
        found.append(first.setdefault(part, number))
    return tuple(found)


def note_input(tensor: DTensorBase, was_plain: bool) -> None:
    """Make the digests of later collectives on the mesh depend on a module's input. Local.

    If it was made of a local tensor, the digest depends on the inputs before, unless it is
    replicated.
    """
    spec = tensor._spec
    if spec.mesh.size() == 1 or not spec.takes_part or mode() == "off":
        return
    counts = call_counts_of(spec.mesh)
    if was_plain and not spec.is_replicated:
        tensor._digest = hash((spec.digest, counts.inputs))
    else:
        counts.inputs = hash((counts.inputs, digest_of(tensor)))


def note_output(tensor: DTensorBase, local: Any) -> None:
    """Make digests of later collectives depend on a module's output and the gradient of it. Local.

    Plain operators use the output's local tensor, and compute the gradient. If the tensor is
    replicated, all ranks must get the same gradient: digests of later collectives in the backward
    pass depend on it. If only some axes of the mesh replicate, ranks along these axes compare the
    gradient at once.
    """
    spec = tensor._spec
    if spec.mesh.size() == 1 or not spec.takes_part or mode() == "off":
        return
    counts = call_counts_of(spec.mesh)
    counts.inputs = hash((counts.inputs, digest_of(tensor)))
    if not local.requires_grad or spec.partial_axes:
        return
    if spec.is_replicated:
        local.register_hook(_noting(tensor))
    elif spec.mesh.ndim > 1:
        local.register_hook(lambda grad: compare_gradients(grad, spec))


def note_gradient_from_plain(tensor: DTensorBase, local: Tensor) -> None:
    """Make digests depend on the gradient that comes to a replicated tensor from ``local``. Local.

    Plain operators use ``local``, and compute the gradient, which all ranks must get the same.
    """
    spec = tensor._spec
    if spec.mesh.size() == 1 or not spec.takes_part or mode() == "off" or local.grad_fn is None:
        return
    note, number = _noting(tensor), local.output_nr
    # Not of the tensor: a gradient that the program only looks at stays on the rank.
    local.grad_fn.register_prehook(lambda grads: note(grads[number]))


def _noting(tensor: DTensorBase) -> Callable[[Tensor | None], None]:
    counts, digest = call_counts_of(tensor._spec.mesh), digest_of(tensor)

    def note(grad: Tensor | None) -> None:  # None: from a node that has other results, too
        content = None if grad is None else content_digest(grad)
        counts.note_plain_gradient(hash((digest, content)))

    return note


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
    """The first element that differs, beyond rounding, from the group's first rank. Collective."""
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
    """Raise unless all ranks have the same plain tensors by name, up to rounding. Collective.

    Unless ``full``, only a sample of large tensors is hashed. The error names the first tensor that
    differs, and two ranks; ``advice`` ends it: what to look for.
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
