"""A load on the ranks of a host, and the interface of the ways of reading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tilework.checkpoint.load_planning import LoadPlan, Wanted
from tilework.checkpoint.reading import PartReader
from tilework.checkpoint.targets import Targets
from tilework.comm.contract import ProcessGroup


@dataclass(frozen=True)
class HostLoad:
    """A load, as one rank of a host sees it.

    Args:
        plan: The work of this rank.
        wanted: The tensors to load, the same on all ranks.
        reader: Reads parts.
        targets: The memory of this rank.
        rank: The global rank.
        group: The ranks of the host; None if this rank loads alone.
    """

    plan: LoadPlan
    wanted: Sequence[Wanted]
    reader: PartReader
    targets: Targets
    rank: int
    group: ProcessGroup | None


class WayOfReading(Protocol):
    """A way in which the ranks of a host read a part of a plan.

    All ranks of a host call the same ways in the same order. Each way reads another part of the
    plan, puts the elements in place, and does nothing if the plan has no such part.
    """

    def __call__(self, load: HostLoad) -> None:
        """Read this way's part of the plan.

        Raises:
            CheckpointError: Some bytes that this rank has read are damaged.
        """


def read_own(load: HostLoad) -> None:
    """Read for this rank alone, directly into the targets. Local."""
    reader = load.reader
    reader.check_sizes(sorted({each.part.file for each in load.plan.reads}))
    with reader.together():
        for each in load.plan.reads:
            saved = load.wanted[each.tensor].saved
            target = load.targets.place(each.tensor, each.part, each.need)
            reader.read_box(saved, each.part, each.need.box, target)
