"""Comparison of parts of a DTensor or gradient that must be equal on several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup
from tilework.comm.operations.internal import all_gather_into_tensor, device_of
from tilework.comm.per_call.internal import call_site
from tilework.dtensor.base import DTensorBase
from tilework.dtensor.provenance.content import content_digest, mode
from tilework.dtensor.provenance.digests import call_counts_of, digest_of
from tilework.dtensor.spec import DTensorSpec, Ints
from tilework.errors import CollectiveMismatchError


def compare_replicas(local: Tensor, spec: DTensorSpec) -> None:
    """Raise if ranks that must hold the same part hold different values, as far as the mode says.

    Collective over the mesh, if some axis replicates. Called for tensors that other axes shard: the
    digests of later collectives cannot contain the values, since they differ between shards. For
    tensors that all axes replicate, digests contain the values, and no comparison is needed.

    Args:
        local: This rank's part.
        spec: The layout.

    Raises:
        CollectiveMismatchError: Parts differ; on every rank of the mesh.
    """
    if not _is_compared(local):
        return
    first = first_replicas(spec)
    if first != tuple(range(len(first))):
        group = spec.mesh.axes_group(range(spec.mesh.ndim))
        _compare(local, group, first, "the same part of a tensor with placements", spec)


def compare_gradients(grad: Tensor, spec: DTensorSpec) -> None:
    """As :func:`compare_replicas`, for a gradient. Collective over the axes that replicate only.

    Ranks along the other axes may have different losses, and compute gradients in another order.
    """
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

    Args:
        tensor: The input.
        was_plain: True if the input was made of a local tensor. Then its digest depends on the
            inputs before, unless it is replicated.
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

    Plain operators use the output, and compute the gradient. If the tensor is replicated, all ranks
    must get the same gradient: digests of later collectives in the backward pass depend on it. If
    only some axes of the mesh replicate, ranks along these axes compare the gradient at once.

    Args:
        tensor: The output.
        local: The output's local tensor, which the program uses.
    """
    spec = tensor._spec
    if spec.mesh.size() == 1 or not spec.takes_part or mode() == "off":
        return
    counts = call_counts_of(spec.mesh)
    counts.inputs = hash((counts.inputs, digest_of(tensor)))
    if not local.requires_grad or spec.partial_axes:
        return
    if spec.is_replicated:
        digest = spec.digest
        local.register_hook(
            lambda grad: counts.note_plain_gradient(hash((digest, content_digest(grad))))
        )
    elif spec.mesh.ndim > 1:
        local.register_hook(lambda grad: compare_gradients(grad, spec))
