"""Jobs that are planned: the program runs once for each kind of rank, in this process."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple

import torch

from tilework.comm.per_call.internal import PretendedCall
from tilework.errors import PretendError
from tilework.inspect import MemoryByUse
from tilework.plan.cluster import Cluster
from tilework.plan.kinds import kinds_of
from tilework.plan.mismatches import mismatches_of
from tilework.plan.replacing import math_with_numbers
from tilework.plan.report import AxisTraffic, Branch, PlanReport, RankReport, StartCost
from tilework.plan.running import PretendedJob, RankRun, place_of, run_rank
from tilework.plan.timing import RankTime, Workload, rank_times
from tilework.plan.unknown import Decisions, RunAgain, is_void, refusal_of

#: The most times that ranks run, for each to get what the others have gathered from.
_MOST_PASSES = 20


class _Ran(NamedTuple):
    """The run of a rank, what it computed, and the report."""

    run: RankRun
    work: Workload
    report: RankReport


_Runs = dict[int, _Ran]


@dataclass(frozen=True)
class _Program:
    """A program, and how it is to run."""

    program: Callable[[], Any]
    everyone: bool
    alike: bool
    is_script: bool


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
        alike: bool = False,
        is_script: bool = False,
    ) -> PlanReport:
        """Run ``program(*arguments)`` as each kind of rank, and report. Blocks; starts no process.

        The default group is there when the program begins; the program may also make it.

        Args:
            program: Runs on each rank, as on a real rank: builds a model, takes a step or two.
            arguments: The arguments.
            everyone: Run each rank, not each kind.
            alike: The program does the same on ranks whose shards are equal: run a rank of each
                size of shards, and of each stage of a pipeline.
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
        how = _Program(lambda: program(*arguments), everyone, alike, is_script)
        decisions = Decisions()
        with math_with_numbers():  # the search of all modules takes as long as a small program
            report, runs = self._way(how, decisions)
            branches = [self._branch(how, site, runs, decisions) for site in list(decisions.asked)]
        seconds = time.perf_counter() - begun
        return replace(report, branches=branches, seconds=seconds).with_changes()

    def _way(self, how: _Program, decisions: Decisions) -> tuple[PlanReport, _Runs]:
        """The report on the way that goes on: on which no answer leads to an error."""
        while True:
            try:
                return self._planned(how, decisions)
            except PretendError:
                raise
            except Exception:
                if not decisions.last or decisions.last in decisions.yes:
                    raise
                decisions.yes.add(decisions.last)
                decisions.asked.clear()

    def _planned(
        self, how: _Program, decisions: Decisions, only: int | None = None
    ) -> tuple[PlanReport, _Runs]:
        """The report on one way through the program, and the runs of ranks; ``only``: of one."""
        device = torch.device(self.cluster.device)
        job = PretendedJob(self.ranks, self.hosts, device, decisions=decisions)
        runs: _Runs = {}
        which = list(range(self.ranks)) if how.everyone else [0]
        for number in count():
            if number and (only is not None or not job.values.begin_pass()):
                break
            if number == _MOST_PASSES:
                raise PretendError(
                    f"what ranks gather and reduce depends on what they got before, over more than "
                    f"{_MOST_PASSES} calls, or differs from run to run (times, numbers without a "
                    f"seed): plan fewer steps, or with values that ranks know"
                )
            for rank in which if only is None else [only]:
                runs[rank] = self._run_rank(how, rank, job)
                if len(which) == 1 and not number:
                    run = runs[rank].run
                    which += [
                        r for r in kinds_of(run.meshes, run.calls, self.ranks, how.alike) if r
                    ]
        calls = {rank: each.run.calls for rank, each in runs.items()}
        works = {rank: each.work for rank, each in runs.items()}
        times = rank_times(calls, works, self.cluster, self._is_between_hosts)
        report = PlanReport(
            self.ranks,
            self.hosts,
            self.cluster,
            [replace(runs[rank].report, time=times[rank]) for rank in sorted(runs)],
            mismatches_of(calls),
            everyone=len(runs) == self.ranks,
        )
        return report, runs

    def _branch(self, how: _Program, site: str, runs: _Runs, decisions: Decisions) -> Branch:
        """The program's course if the answer at one line is the other."""
        rank = decisions.asked[site]
        try:
            _, others = self._planned(how, decisions.other(site), rank)
            here, there = runs[rank], others[rank]
            if (here.run.calls, here.report.peak.bytes) == (
                there.run.calls,
                there.report.peak.bytes,
            ):
                return Branch(site)
            report, _ = self._planned(how, decisions.other(site))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return Branch(site, ends=f"{type(error).__name__}: {error}")
        return Branch(site, report)

    def _run_rank(self, how: _Program, rank: int, job: PretendedJob) -> _Ran:
        while True:
            memory, work = MemoryByUse(), Workload(self.cluster)
            try:
                run = run_rank(how.program, rank, job, (work, memory), how.is_script)
                return _Ran(run, work, self._reported(run, memory))
            except (RunAgain, Exception) as error:
                if not is_void(error, job.decisions):
                    refusal = refusal_of(error, job.decisions)
                    if isinstance(error, PretendError) or refusal is None:
                        raise
                    raise refusal from error
                job.decisions.asked.clear()

    def _reported(self, run: RankRun, memory: MemoryByUse) -> RankReport:
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
        return RankReport(
            run.rank,
            memory.peak,
            traffic,
            len(calls) - len(mine),
            sum(len(call.ranks) > 1 and not call.is_async for call in mine),
            RankTime(0.0, 0.0, None),
            StartCost.of(run.meetings, self.ranks),
            run.stopped,
            frozenset(run.assumed),
            run.saved,
        )

    def _is_between_hosts(self, call: PretendedCall) -> bool:
        ends = min(call.ranks), max(call.ranks)
        return len({place_of(rank, self.ranks, self.hosts)[2] for rank in ends}) > 1


@contextmanager
def pretend(
    ranks: int, hosts: int = 1, memory: str | int | None = None, cluster: Cluster | None = None
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
