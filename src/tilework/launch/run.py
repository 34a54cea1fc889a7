"""``tilework run``: from the command line to the exit status."""

from __future__ import annotations

import contextlib
import importlib
import os
from dataclasses import dataclass
from pathlib import Path

from tilework.comm.launching import DIRECTORY_VARIABLE
from tilework.cores import threads_per_rank
from tilework.launch.binding import bound_sets
from tilework.launch.elastic_nodes import join_again, join_service
from tilework.launch.environment import library_environment
from tilework.launch.failure_report import RankFailure
from tilework.launch.failure_text import failure_text, other_failures_text
from tilework.launch.flight_records import FlightFolder
from tilework.launch.job import Frontend, Job
from tilework.launch.nodes import Nodes, join_nodes
from tilework.launch.output import Output, wants_colour
from tilework.launch.program import Program
from tilework.launch.rank_line import RankLine
from tilework.launch.recovery import Recovery
from tilework.launch.settings import LaunchSettings
from tilework.launch.signals import SignalInbox, die_quietly
from tilework.launch.stdin import StandardInput
from tilework.launch.supervise import Outcome

#: Imported once before forking, so that no rank has to.
_PRELOADED = ("torch", "tilework.distributed", "tilework.comm.backends.shm.shm_backend")

#: After a failure, seconds to wait for a reader that has stopped reading; else no limit.
_LAST_FLUSH_SECONDS = 1.0


def run(settings: LaunchSettings, program: Program) -> int:
    """Run ``program`` on every rank and return the exit status; blocks until all is over.

    For a process that is only the launcher, in the main thread. The status is 0, that of the rank
    whose failure ended the job, or 128 + number of the signal that this process got. Raises OSError
    if nothing can be started or written, NodesError or DistNetworkError if launchers do not meet.
    """
    die_quietly()
    _occupy_standard_descriptors()
    threads = threads_per_rank(settings.nprocs, os.environ)
    os.environ.update(library_environment(settings, os.environ))  # before torch is loaded
    with contextlib.ExitStack() as stack:
        cpus = stack.enter_context(bound_sets(settings.bind, settings.nprocs))
        nodes = None
        if settings.several_hosts:
            join = join_nodes if settings.elastic_nodes is None else join_service
            nodes = join(settings)
            stack.callback(nodes.close)
        if settings.start == "fork":
            _preload()
        flight = FlightFolder.choose(settings.log_dir, os.environ)
        os.environ[DIRECTORY_VARIABLE] = str(flight.path)  # ranks inherit our environment
        printer = _Printer(Output(settings), flight, settings.trace)
        stack.callback(printer.output.close)
        stdin = stack.enter_context(contextlib.closing(StandardInput()))
        attempt = 0
        while True:
            with SignalInbox() as inbox:
                front = Frontend(
                    printer.output,
                    stdin,
                    inbox,
                    printer.print_failure,
                    printer.print_flight_folder,
                    cpus,
                    _watch(settings, printer, nodes),
                )
                with Job(settings, program, threads, front, nodes=nodes) as job:
                    outcome = job.supervise()
            # From here on there is nothing to clean up, and a signal again ends this process at
            # once, even if nobody reads the rest of the output.
            assert outcome is not None
            printer.output.drain()
            if outcome.begins_again:
                nodes = _begin_again(nodes, settings, printer)
                continue
            printer.print_summary(outcome, job.left_behind, job.recovery)
            if outcome.root is None or attempt == settings.max_restarts or inbox.ends_job:
                break
            attempt += 1
            notice = f"all ranks start again ({attempt} of {settings.max_restarts} restarts)"
            printer.output.write_notice(f"tilework: {notice}\n")
        printer.print_end()
        printer.output.flush(_LAST_FLUSH_SECONDS if outcome.exit_status else None)
        return outcome.exit_status


def _begin_again(nodes: Nodes | None, settings: LaunchSettings, printer: _Printer) -> Nodes:
    notice = "hosts were lost before the ranks met, or all that had: it begins again"
    printer.output.write_notice(f"tilework: {notice}\n")
    assert nodes is not None
    return join_again(nodes, settings)


@dataclass(frozen=True)
class _Printer:
    """Prints what happened to the ranks, beside their output."""

    output: Output
    flight: FlightFolder
    #: The folder of the ranks' traces; None: they are not traced.
    trace: Path | None

    def print_failure(self, failure: RankFailure) -> None:
        for stream in self.output.streams:
            stream.read()
        self.output.report(failure_text(failure, wants_colour(2)))
        if failure.traceback:
            self.output.log_failure(failure.rank, f"{failure.traceback.rstrip()}\n")

    def print_flight_folder(self) -> None:
        self.flight.wanted = True
        self.output.write_notice(
            f"tilework: ranks write their flight records to {self.flight.path}\n"
        )

    def print_summary(
        self, outcome: Outcome, left_behind: list[str], recovery: Recovery | None
    ) -> None:
        if outcome.root is not None:
            self.output.report(other_failures_text(outcome.root, outcome.others, wants_colour(2)))
        for failure in outcome.others:
            if failure.traceback:
                self.output.log_failure(failure.rank, f"{failure.traceback.rstrip()}\n")
        notes = self.output.take_problems()
        if recovery is not None and (report := recovery.report()):
            notes.append(report)
        if outcome.lost_output is not None and outcome.exit_status == 1:
            notes.append(f"cannot write output: {outcome.lost_output.strerror}; the job was ended")
        if left_behind and outcome.interrupted is None:
            notes.append(f"ended what ranks had left running: {', '.join(left_behind)}")
        if outcome.root is not None and (records := self.flight.announce()):
            notes.append(records)
        for line in notes:
            self.output.write_notice(f"tilework: {line}\n")

    def print_end(self) -> None:
        self.flight.close()
        if self.trace is not None:
            self.output.write_notice(
                f"tilework: what the ranks did: tilework trace {self.trace} -o step.json\n"
            )


def _watch(settings: LaunchSettings, printer: _Printer, nodes: Nodes | None) -> RankLine | None:
    if settings.watch is None:
        return None
    title = "" if nodes is None else f"node {nodes.place.node}: "

    def write(line: str) -> None:
        printer.output.write_notice(f"tilework: {title}{line}\n")

    return RankLine(settings.watch.total_seconds(), printer.flight.path, write)


def _preload() -> None:
    for name in _PRELOADED:
        # A failing import fails again in the ranks that need it, and is reported there.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def _occupy_standard_descriptors() -> None:
    """Open /dev/null for closed standard streams (``<&-``), lest pipes get the numbers 0 to 2."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
