"""The count of passes of a wrapped module, carried in the headers of the module's collectives.

Data parallelism averages the gradients that each rank computed in *the same* step. A rank that
skips a backward pass, or does two, would pair gradients of different steps from then on. Therefore
a wrapped module counts its forward passes, its backward passes, and how often parameters have
changed between these. The digest of the counts goes into the header of each collective, which ranks
compare, as they compare shapes. Ranks that differ all raise, each with the counts.

Backends without headers (torch's engines) do not compare digests. For these, let an all_reduce that
the module makes anyway take the maximum of :attr:`Passes.digest` and of the negative digest, and
call :func:`compare_passes` where the two differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

from torch import Tensor

from tilework.comm.contract import ProcessGroup
from tilework.comm.operations.internal import agree
from tilework.comm.provenance_digest import ADVICE_ON_PASSES, OF_A_PASS, carrying
from tilework.dtensor.internal import mode, stable_digest
from tilework.errors import CollectiveMismatchError

_version = attrgetter("_version")
#: Parameters are compared in the first passes, then at two larger intervals.
_FIRST, _SOON, _OFTEN, _LATER = 4, 4, 64, 16


class Passes:
    """Counts of one wrapped module on one rank; equal on all ranks that run the same program.

    ``kind`` is the wrapper, for errors. ``names`` are plain data that identify the module in the
    program, the same on all ranks: collectives of different modules then differ.
    """

    __slots__ = (
        *("_digest", "_seed", "_tensors", "_versions"),
        *("backwards", "changes", "forwards", "kept", "kind"),
    )

    def __init__(self, kind: str, names: Iterable[Any] = ()) -> None:
        self.kind = kind
        self._seed = stable_digest(kind, list(names))
        self.reset()

    def reset(self) -> None:
        """Count from 0 again: where all ranks do at the same time, as after ``Join``. Local."""
        self.forwards = self.backwards = self.changes = 0
        self.kept = False
        self._tensors: Sequence[Tensor] | None = None
        self._versions = 0
        self._digest: int | None = None

    def begin_forward(self) -> None:
        """Count a forward pass that communicates, or whose backward pass does. Local.

        Passes without communication do not count, as a rank may make them alone: within
        ``no_sync()``, or without gradients where nothing is gathered.
        """
        self.forwards += 1
        self._digest = None

    def begin_backward(self, tensors: Sequence[Tensor], kept: bool = False) -> None:
        """Count a backward pass that communicates. Local; 0.1 µs for each tensor.

        All writes to ``tensors``, the trained parameters, since the last pass count as one change.
        Another sequence object is a change, too: pass the same while the tensors are the same.
        ``kept``: this pass adds to gradients of earlier synchronised passes.
        """
        versions = sum(map(_version, tensors))
        if self._tensors is not None:
            self.changes += versions != self._versions or tensors is not self._tensors
        self._tensors, self._versions, self.kept = tensors, versions, kept
        self.backwards += 1
        self._digest = None

    @property
    def digest(self) -> int:
        """The digest of the counts, the same in all processes; 0 if the comparison is off."""
        if mode() == "off":
            return 0
        digest = self._digest
        if digest is None:
            counts = self.forwards, self.backwards, self.changes, self.kept
            digest = self._digest = hash((self._seed, *counts))
        return digest

    def carried(self) -> carrying:
        """A context in which headers of this thread's collectives carry the digest of the counts. A
        collective that meets other counts raises, and names the counts.
        """
        return carrying(self.digest, self)

    def is_due(self) -> bool:
        """True if ranks are to compare the values of parameters in the current backward pass."""
        return is_due(self.backwards)

    def __str__(self) -> str:
        changes = f"{self.changes} change{'s' * (self.changes != 1)} of parameters"
        return (
            f"backward pass {self.backwards} of {self.kind}, {OF_A_PASS} {self.forwards} and "
            f"{changes}{', to gradients kept from before' * self.kept}"
        )


def is_due(number: int) -> bool:
    """True if ranks are to compare parameters in the pass or step of this number, from 1.

    In the sampled mode of comparison, the default, these are the first four, every fourth up to the
    64th, and every 16th later. In the full mode these are all; in other modes none.
    """
    how = mode()
    if how != "sampled":
        return how == "full"
    if number <= _OFTEN:
        return number <= _FIRST or not number % _SOON
    return not number % _LATER


def compare_passes(passes: Passes, group: ProcessGroup) -> None:
    """Raise on every rank where ranks have counted differently, naming two of them. Collective over
    the group; blocks.
    """
    every = agree(lambda: (passes.digest, str(passes)), group)
    for rank, (digest, text) in zip(group.global_ranks, every, strict=True):
        if digest != every[0][0]:
            first = group.global_ranks[0]
            raise CollectiveMismatchError(
                f"ranks {first} and {rank} are not in the same step: rank {first} is in "
                f"{every[0][1]}, and rank {rank} in {text}. {ADVICE_ON_PASSES}",
                ranks=(first, rank),
            )
