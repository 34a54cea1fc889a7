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
    """The inputs of one rank for loading a checkpoint together with the other ranks of a host.

    Args:
        plan: The parts of files that this rank reads, and the elements that it gets from them.
        wanted: The saved tensors that any rank loads: the same list on all ranks of the job.
        reader: Reads and checks parts of the checkpoint's files.
        targets: The tensors of this rank to fill.
        rank: This rank's global number.
        group: The ranks of this host, which share what they read; None if this rank loads alone.
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
    """Read the parts that this rank reads alone, directly into the tensors to fill. Local."""
    reader = load.reader
    reader.check_sizes(sorted({each.part.file for each in load.plan.reads}))
    with reader.together():
        for each in load.plan.reads:
            saved = load.wanted[each.tensor].saved
            target = load.targets.place(each.tensor, each.part, each.need)
            reader.read_box(saved, each.part, each.need.box, target)
