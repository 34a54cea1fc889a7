"""Jobs that are planned: the program runs once for each kind of rank, in this process."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tilework.comm.per_call.internal import PretendedCall
from tilework.inspect import MemoryByUse
from tilework.plan.changes import changes_for
from tilework.plan.cluster import Cluster
from tilework.plan.kinds import kinds_of
from tilework.plan.mismatches import mismatches_of
from tilework.plan.report import AxisTraffic, PlanReport, RankReport
from tilework.plan.running import PretendedJob, RankRun, place_of, run_rank
from tilework.plan.timing import RankTime, Workload, moving_seconds

#: The most times that ranks run, for each to get what the others have gathered from.
_MOST_PASSES = 3


@dataclass(frozen=True)
class PlannedJob:
    """A job that is planned; from :func:`pretend`.

    Attributes:
        ranks: The number of ranks.
        hosts: The number of hosts.
        cluster: The machines.
    """

    ranks: int
    hosts: int
    cluster: Cluster
    _closed: list[bool] = field(default_factory=list, repr=False)

    def run(
        self,
        program: Callable[..., Any],
        *arguments: Any,
        everyone: bool = False,
        is_script: bool = False,
    ) -> PlanReport:
        """Run ``program(*arguments)`` as each kind of rank, and report. Blocks; starts no process.

        The default group is there when the program begins; the program may also make it.

        Args:
            program: Runs on each rank, as on a real rank: builds a model, takes a step or two.
            arguments: The arguments.
            everyone: Run each rank, not each kind.
            is_script: True if the program makes the default group itself.

        Raises:
            PretendError: The program needs a value that only a real run has.
            ValueError: The ``with`` block of the job is over.

        Example:
            >>> import torch
            >>> from tilework.parallel import DistributedDataParallel
            >>> def program():
            ...     model = DistributedDataParallel(torch.nn.Linear(1000, 1000))
            ...     model(torch.randn(8, 1000)).sum().backward()
            >>> with pretend(ranks=512, hosts=64) as job:
            ...     report = job.run(program)
            >>> report.is_good, report.worst.peak.by_use()["parameters"]
            (True, 4004000)
        """
        if self._closed:
            raise ValueError("the job is over: run programs within the block of pretend()")
        begun = time.perf_counter()
        job = PretendedJob(self.ranks, self.hosts, torch.device(self.cluster.device))
        reports: dict[int, RankReport] = {}
        calls: dict[int, list[PretendedCall]] = {}
        which = list(range(self.ranks)) if everyone else [0]
        for number in range(_MOST_PASSES):
            if number and not job.values.begin_pass():
                break
            for rank in which:
                run, reports[rank] = self._run_rank(program, arguments, rank, job, is_script)
                calls[rank] = run.calls
                if len(which) == 1 and not number:
                    which += [r for r in kinds_of(run.meshes, run.calls, self.ranks) if r]
        kinds_run = [reports[rank] for rank in sorted(reports)]
        report = PlanReport(
            self.ranks,
            self.hosts,
            self.cluster,
            kinds_run,
            mismatches_of(calls),
            seconds=time.perf_counter() - begun,
            everyone=len(kinds_run) == self.ranks,
        )
        return changes_for(report)

    def _run_rank(
        self,
        program: Callable[..., Any],
        arguments: tuple[Any, ...],
        rank: int,
        job: PretendedJob,
        is_script: bool,
    ) -> tuple[RankRun, RankReport]:
        memory, work = MemoryByUse(), Workload(self.cluster)
        with ExitStack() as stack:
            run = run_rank(
                lambda: program(*arguments),
                rank,
                job,
                _both(work, memory),
                is_script=is_script,
            )
            del stack
        return run, self._reported(run, memory, work)

    def _reported(self, run: RankRun, memory: MemoryByUse, work: Workload) -> RankReport:
        calls = [call for call in run.calls if call.waits_for is None]
        mine = [call for call in calls if not call.is_check]
        nbytes: Counter[str] = Counter()
        collectives: Counter[str] = Counter()
        messages: Counter[str] = Counter()
        for call in mine:
            if len(call.ranks) > 1:
                axis = run.axis_of(call)
                nbytes[axis] += call.nbytes
                (collectives if call.peer is None else messages)[axis] += 1
        traffic = {
            axis: AxisTraffic(n, collectives[axis], messages[axis]) for axis, n in nbytes.items()
        }
        moving = moving_seconds(calls, self.cluster, self._is_between_hosts)
        return RankReport(
            run.rank,
            memory.peak,
            traffic,
            len(calls) - len(mine),
            sum(len(call.ranks) > 1 and not call.is_async for call in mine),
            RankTime(work.seconds, moving, self.cluster.error),
            run.stopped,
            frozenset(run.assumed),
        )

    def _is_between_hosts(self, call: PretendedCall) -> bool:
        ends = min(call.ranks), max(call.ranks)
        return len({place_of(rank, self.ranks, self.hosts)[2] for rank in ends}) > 1


@contextmanager
def _both(*modes: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        yield


@contextmanager
def pretend(
    ranks: int,
    hosts: int = 1,
    memory: str | int | None = None,
    cluster: Cluster | None = None,
) -> Iterator[PlannedJob]:
    """A job of ``ranks`` ranks that do not run: for planning it in this process.

    Tensors have no memory, groups no peers. See ``docs/how-to/plan-a-job.md``.

    Args:
        ranks: The number of ranks.
        hosts: The number of hosts. The first hosts have one rank more if they do not divide.
        memory: The memory of a rank, such as ``"80 GB"``; None: that of ``cluster``.
        cluster: The machines; None: CPUs, with times that are estimates.

    Raises:
        ValueError: There are fewer ranks than hosts, or the memory is no amount of memory.

    Example:
        >>> import tilework.distributed as dist
        >>> with pretend(ranks=65536) as job:
        ...     print(job.run(dist.barrier).kinds[-1].rank)
        65535
    """
    for name, value in (("ranks", ranks), ("hosts", hosts)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number from 1, got {value!r}")
    if hosts > ranks:
        raise ValueError(f"{hosts} hosts need at least as many ranks, got {ranks}")
    job = PlannedJob(ranks, hosts, (cluster or Cluster()).with_memory(memory))
    try:
        yield job
    finally:
        job._closed.append(True)
