"""Digests across stretches of plain tensors, between modules whose layouts a plan gives.

The results of plain operators have no digest. But a module of the plan may take a plain tensor
that is the same on all ranks, and a later module on the same mesh may communicate a tensor that
plain operators computed from it. The mesh therefore keeps a digest of all inputs and outputs of
modules so far.
"""

from __future__ import annotations

from typing import Any

from tilework.dtensor.base import DTensorBase
from tilework.dtensor.provenance.call_counts import call_counts_of
from tilework.dtensor.provenance.content import content_digest
from tilework.dtensor.provenance.digests import digest_of
from tilework.dtensor.provenance.mode import mode
from tilework.dtensor.provenance.replicas import compare_gradients


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
        local: The output's local tensor, with which the program goes on.
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
