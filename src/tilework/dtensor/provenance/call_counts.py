"""Counts of what a mesh's ranks have done together so far, as far as digests need it."""

from __future__ import annotations

from tilework.mesh import DeviceMesh

_MOST = (1 << 61) - 1


class CallCounts:
    """Counts of one rank for one mesh: the same on all ranks while the ranks do the same."""

    __slots__ = ("creations", "inputs", "passes", "passing", "steps")

    def __init__(self) -> None:
        #: Collectives that made tensors of values from one rank.
        self.creations = 0
        #: The digest of all inputs and outputs so far of modules with plain tensors in between.
        self.inputs = 0
        #: The sum of the digests of all backward passes, and of what they communicated.
        self.passes = 0
        #: The digest of the backward pass that runs; 0: none that began at a DTensor.
        self.passing = 0
        #: Optimizer steps.
        self.steps = 0

    def note_gradient(self, digest: int) -> None:
        """Add the digest of a backward pass, or of a tensor that it communicated; in any order."""
        self.passes = (self.passes + digest) & _MOST

    def note_plain_gradient(self, digest: int) -> None:
        """Add a gradient that comes from plain tensors, which are to be the same on all ranks."""
        self.note_gradient(digest)
        self.passing = (self.passing + digest) & _MOST


def call_counts_of(mesh: DeviceMesh) -> CallCounts:
    """This rank's counts for a mesh."""
    counts: CallCounts | None = mesh.call_counts
    if counts is None:
        counts = mesh.call_counts = CallCounts()
    return counts
