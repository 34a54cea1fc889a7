"""A rank of a job, pretended: the program runs as it is, on tensors without memory."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tilework.comm.groups import init_process_group
from tilework.comm.per_call.internal import (
    JobValues,
    MeetingCost,
    Pretence,
    PretendedCall,
    pretending,
)
from tilework.comm.world import World, current_world, own_world
from tilework.errors import PretendError
from tilework.inspect import MemoryByUse
from tilework.mesh.internal import meshes_of_rank
from tilework.plan.attention import attention_as_on
from tilework.plan.kinds import PlacedMesh, axis_of
from tilework.plan.replacing import replaced
from tilework.plan.tensors import WithoutMemory
from tilework.plan.timing import Workload
from tilework.plan.unknown import Decisions


@dataclass(frozen=True)
class PretendedJob:
    """A job to pretend: the sizes, the device of tensors, and the values that were sent so far."""

    ranks: int
    hosts: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    values: JobValues = field(default_factory=JobValues)
    decisions: Decisions = field(default_factory=Decisions)


@dataclass(eq=False)
class RankRun:
    """The run of one pretended rank."""

    rank: int
    calls: list[PretendedCall] = field(default_factory=list)
    meshes: list[PlacedMesh] = field(default_factory=list)
    #: The meetings in which the rank has made groups.
    meetings: list[MeetingCost] = field(default_factory=list)
    #: The reason for which the rank stopped after it had left the job; "" if it ran to the end.
    stopped: str = ""
    #: What was assumed of values that only a real run has.
    assumed: set[str] = field(default_factory=set)
    #: The bytes of checkpoints that the rank would have written.
    saved: int = 0

    def axis_of(self, call: PretendedCall) -> str:
        """The axis of a mesh along which a call runs."""
        return axis_of(self.meshes, call.ranks)


def run_rank(
    program: Callable[[], None],
    rank: int,
    job: PretendedJob,
    counting: Sequence[Workload | MemoryByUse],
    is_script: bool = True,
) -> RankRun:
    """Run ``program`` as one rank of a job. Blocks; starts no process.

    The modes ``counting`` see what it computes. A script makes the default group; else the group is
    there. Raises PretendError if the program needs a value that only a real run has.
    """
    run = RankRun(rank)
    pretence = Pretence(rank, job.ranks, job.hosts, job.device.type, job.values)
    meshes: dict[int, Any] = {}

    def look(call: PretendedCall | None = None) -> None:
        """Keep the meshes, which would end with their last tensors."""
        meshes.update((id(mesh), mesh) for mesh in meshes_of_rank())

    pretence.listeners += [look, *(each.note for each in counting if isinstance(each, Workload))]
    run.calls, run.assumed = pretence.calls, pretence.assumed
    world = World()
    with ExitStack() as stack:
        for context in (
            own_world(world),
            _environment(rank, job),
            pretending(pretence),
            replaced(job.device, job.decisions),
            attention_as_on(job.device),
            without := WithoutMemory(pretence, job.device),
            without.asked,
        ):
            stack.enter_context(context)
        try:
            if not is_script:
                init_process_group()
                pretence.is_early = True
            with ExitStack() as modes:
                for mode in counting:
                    modes.enter_context(mode)
                program()
            look()
        except PretendError as error:
            # A rank that has left the job may check, draw or write whatever it likes.
            if world.default_group is not None or not run.calls:
                raise
            run.stopped = str(error)
        finally:
            run.saved = pretence.saved.total()
            run.meetings = [job.values.meetings[sizes] for sizes in pretence.meetings]
            inside = [mesh for mesh in meshes.values() if mesh.get_coordinate() is not None]
            run.meshes = [PlacedMesh.of(mesh, rank) for mesh in inside]
            current_world().end()
    return run


@contextmanager
def _environment(rank: int, job: PretendedJob) -> Iterator[None]:
    """The variables that a launcher sets, and random numbers as at the start of a process."""
    first, local, count = place_of(rank, job.ranks, job.hosts)
    values = {
        "RANK": rank,
        "WORLD_SIZE": job.ranks,
        "LOCAL_RANK": rank - first,
        "LOCAL_WORLD_SIZE": local,
        "GROUP_RANK": count,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 0,
    }
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: str(value) for name, value in values.items()})
    states = random.getstate(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def place_of(rank: int, ranks: int, hosts: int) -> tuple[int, int, int]:
    """The first rank of the host of a rank, the number of ranks there, and the host's number.

    The first hosts have one rank more where the ranks do not divide.
    """
    least, more = divmod(ranks, hosts)
    border = more * (least + 1)
    host = rank // (least + 1) if rank < border else more + (rank - border) // max(least, 1)
    first = host * least + min(host, more)
    return first, least + (host < more), host
