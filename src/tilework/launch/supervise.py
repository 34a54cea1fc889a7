"""The launcher's loop: wait for ranks, pass output on, end all ranks when one fails.

One thread, one ``poll``. The decisions are in pure modules: which failure to blame
(:mod:`~tilework.launch.failure_report`) and how to end ranks (:mod:`~tilework.launch.signals`).
"""

from __future__ import annotations

import errno
import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from tilework.comm.launching import LAUNCHER_SIGNAL
from tilework.launch import linux, orphans, signals
from tilework.launch.failure_report import FailureReport, RankFailure, root_cause, settle_time
from tilework.launch.nodes import Kind, Message, NodeLink
from tilework.launch.output import Output, Screen
from tilework.launch.process import RankProcess
from tilework.launch.rank_line import RankLine
from tilework.launch.recovery import Answer, Recovery
from tilework.launch.signals import ENDING_SIGNALS, SignalInbox, TerminationStep
from tilework.launch.stdin import StandardInput

#: The interval of checks where the system does not report a process's end.
_ASK_SECONDS: Final = 0.02
#: The interval of checks, after deaths, whether the remaining ranks are still needed.
_LOOK_SECONDS: Final = 0.2
#: The interval of reaping adopted processes.
_REAP_SECONDS: Final = 5.0
#: The time that ranks may be stopped after all others have finished, and the interval of checks.
_STOPPED_SECONDS: Final = 10.0
_LOOK_FOR_STOPPED_SECONDS: Final = 1.0


@dataclass(frozen=True)
class Outcome:
    """The way in which a job has ended."""

    root: RankFailure | None = None
    """The failure to blame; None if no rank failed, or the user ended the job."""
    others: tuple[RankFailure, ...] = ()
    """Other ranks that failed by themselves."""
    interrupted: int | None = None
    """The signal by which the user, or another host's launcher, ended the job; None if none."""
    lost_output: OSError | None = None
    """The error that ended the job, if the launcher could not write its output."""
    begins_again: bool = False
    """True if all hosts of the job are to begin again."""

    @property
    def exit_status(self) -> int:
        if self.interrupted is not None:
            return 128 + self.interrupted
        if self.lost_output is not None:  # as for any program at the head of a broken pipe
            return 128 + signal.SIGPIPE if self.lost_output.errno == errno.EPIPE else 1
        return 0 if self.root is None else self.root.exit_status


@dataclass(frozen=True)
class Endpoints:
    """Input, output, signals and callbacks that the loop serves besides the ranks; all optional."""

    #: The ranks' output to pass on; None: the loop passes no output on.
    output: Output | None = None
    #: Passes lines of a terminal on to rank 0; None: the loop reads no terminal.
    stdin: StandardInput | None = None
    #: Signals to the launcher; None: signals interrupt this program as usual.
    inbox: SignalInbox | None = None
    #: Called with the failure to blame, and with failures that the job outlives.
    on_failure: Callable[[RankFailure], None] = lambda failure: None
    #: Called when the user asks the ranks for their flight records.
    on_asked: Callable[[], None] = lambda: None
    #: Given if the job may continue without a rank.
    recovery: Recovery | None = None
    #: Starts a new process for a rank.
    restart: Callable[[RankProcess], None] = lambda rank: None
    #: Selects ranks that train, without those that wait to be let in or are out.
    members: Callable[[Sequence[RankProcess]], Sequence[RankProcess]] = lambda ranks: ranks
    #: Seconds from the user's signal to SIGKILL.
    grace: float = signals.KILL_SECONDS
    #: Called once for each rank that has ended, if the job continues.
    on_end: Callable[[RankProcess], None] = lambda rank: None
    #: Given if this process adopts orphans of ranks: the children that are not orphans.
    own_children: Callable[[], Sequence[int]] | None = None
    #: Given if other launchers start ranks of the job on other hosts.
    link: NodeLink | None = None
    #: Given if lines about the ranks are wanted.
    watch: RankLine | None = None


@dataclass(eq=False)
class Supervisor:
    """Runs the loop until every rank has ended."""

    #: The ranks of this host, in the job's own list: a restart replaces a rank's process there.
    ranks: Sequence[RankProcess]
    #: The input, output and callbacks of the loop; by default there are none.
    around: Endpoints = field(default_factory=Endpoints)
    _failures: dict[int, RankFailure] = field(default_factory=dict)
    _root: RankFailure | None = None
    _interrupted: int | None = None
    _lost_output: OSError | None = None
    _steps: list[TerminationStep] = field(default_factory=list)
    _stop_began: float | None = None
    _reap_at: float = 0.0
    #: The time since which all living ranks are stopped.
    _stopped_since: float | None = None
    _told_end: bool = False
    _begins_again: bool = False
    #: Answered failures, by process: the job outlives them, or ended for the last.
    _outlived: dict[int, RankFailure] = field(default_factory=dict)
    #: Processes whose end was reported.
    _ended: set[int] = field(default_factory=set)
    _told_failures: list[RankFailure] = field(default_factory=list)

    def run(self, seconds: float | None = None) -> bool:
        """Serve until every rank has ended (True), at most ``seconds`` (then False)."""
        deadline = None if seconds is None else time.monotonic() + seconds
        late = False
        while any(rank.alive for rank in self.ranks) or self._undecided or self._others_need_us():
            if late:
                return False
            # Look at the ranks at least once, also without any time.
            late = deadline is not None and time.monotonic() >= deadline
            self._serve(deadline)
            self._note_lost_output()
            self._hear_others()
            self._note_failures()
            self._pass_ends_on()
            self._decide()
            self._end_outsiders()
            self._blame_stopped()
            self._step()
        return True

    @property
    def outcome(self) -> Outcome:
        """The job's end; meaningful once :meth:`run` has returned True."""
        if self._interrupted is not None or self._lost_output is not None:
            return Outcome(interrupted=self._interrupted, lost_output=self._lost_output)
        if self._root is None:
            return Outcome(begins_again=self._begins_again)
        failures = dict(self._failures)  # as known by now, with the cause's exit status
        return Outcome(failures.pop(self._root.rank), tuple(failures.values()))

    def stop(self, steps: Sequence[TerminationStep]) -> None:
        self._steps = list(steps)
        self._stop_began = time.monotonic()
        self._step()

    @property
    def _undecided(self) -> bool:
        ended_otherwise = self._interrupted is not None or self._lost_output is not None
        return bool(self._failures) and self._root is None and not ended_otherwise

    # Waiting and reading

    def _serve(self, deadline: float | None) -> None:
        callbacks = self._readers()
        poll = select.poll()
        for fd in callbacks:
            poll.register(fd, select.POLLIN)
        screens = self._screens()
        writers = {s.output.fileno(): s.output.pump for s in screens if s.output.pending_bytes}
        for fd in writers:
            poll.register(fd, select.POLLOUT)
        for fd, _ in poll.poll(self._poll_timeout(deadline)):
            (writers.get(fd) or callbacks[fd])()
        for screen in screens:
            screen.write_due()
        for rank in self.ranks:
            if rank.end_fd is None:
                rank.check()
        if self.around.link is not None:
            self.around.link.beat()
        if self.around.watch is not None and not self._stop_began:
            self.around.watch.look(self.ranks, self._dump_flight_records)
        self._clear_orphans()

    def _readers(self) -> dict[int, Callable[[], object]]:
        callbacks: dict[int, Callable[[], object]] = {}
        for rank in self.ranks:
            if rank.alive and rank.end_fd is not None:
                callbacks[rank.end_fd] = rank.check
            if rank.report_fd >= 0:
                callbacks[rank.report_fd] = rank.read_report
        output, stdin, inbox = self.around.output, self.around.stdin, self.around.inbox
        for stream in output.streams if output is not None else ():
            if stream.fileno() >= 0 and not stream.screen.congested:
                callbacks[stream.fileno()] = stream.read
        if stdin is not None and stdin.wanted():
            callbacks[0] = stdin.pass_on
        if inbox is not None:
            callbacks[inbox.fileno()] = self._take_signals
        if self.around.link is not None:
            callbacks.update(self.around.link.readers())
        return callbacks

    def _screens(self) -> Sequence[Screen]:
        return self.around.output.screens if self.around.output is not None else ()

    def _poll_timeout(self, deadline: float | None) -> int | None:
        """Milliseconds until the next deadline; None: there is none."""
        due = [] if deadline is None else [deadline]
        if self._stop_began is not None and self._steps:
            due.append(self._stop_began + self._steps[0].after)
        if self._undecided:
            due.append(settle_time(list(self._failures.values())))
        look_again = self.around.stdin.look_again_at if self.around.stdin is not None else None
        if look_again is not None:
            due.append(look_again)
        if any(rank.alive and rank.end_fd is None for rank in self.ranks):
            due.append(time.monotonic() + _ASK_SECONDS)
        due += self._next_looks()
        due += [screen.due for screen in self._screens() if screen.due is not None]
        if not due:
            return None
        return max(0, int((min(due) - time.monotonic()) * 1000) + 1)

    def _next_looks(self) -> Iterator[float]:
        """When to look at other nodes and at ranks again."""
        if self.around.link is not None:
            yield self.around.link.beat_due
        if self.around.watch is not None and not self._stop_began:
            yield self.around.watch.due
        if self._has_finished_ranks:
            yield time.monotonic() + _LOOK_FOR_STOPPED_SECONDS
        if self.around.recovery is not None and self._outlived:
            yield time.monotonic() + _LOOK_SECONDS

    def _clear_orphans(self) -> None:
        own = self.around.own_children
        if own is not None and time.monotonic() >= self._reap_at:
            if self._reap_at:
                orphans.reap_orphans(own())
            self._reap_at = time.monotonic() + _REAP_SECONDS

    # Signals

    def _take_signals(self) -> None:
        assert self.around.inbox is not None
        for number in self.around.inbox.read():
            if number in ENDING_SIGNALS:
                self._end_by(number)
            elif number == signal.SIGTSTP:
                self._suspend()
            elif number == signal.SIGUSR1:
                self.around.on_asked()
                self._dump_flight_records(signal.SIGUSR1)
            elif number == signal.SIGWINCH and self.around.output is not None:
                self.around.output.resize()

    def _end_by(self, number: int) -> None:
        """End the ranks on the user's signal; a second signal ends them at once."""
        if self._stop_began is not None and not self._begins_again:
            self.stop(signals.at_once())
        else:
            self._begins_again = False
            self._interrupted = number
            self.stop(signals.after_signal(number, self.around.grace))
            self._tell_others(Kind.INTERRUPTED, signal=number)

    def _suspend(self) -> None:
        """Ctrl-Z: stop the ranks, too, as they are not in our group, and wake them with us."""
        for rank in self.ranks:
            rank.signal_group(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        for rank in self.ranks:
            rank.signal_group(signal.SIGCONT)

    # Failures

    def _note_lost_output(self) -> None:
        """End the job when its output is lost: the reader left, or the disk is full."""
        outputs = [screen.output for screen in self._screens()]
        broken = [output.broken for output in outputs if output.broken is not None]
        if broken and self._stop_began is None:
            self._lost_output = broken[0]
            self.stop(signals.after_signal(signal.SIGTERM))
            self._tell_others(Kind.INTERRUPTED, signal=signal.SIGTERM)

    def _note_failures(self) -> None:
        """Add ranks that have failed by themselves since the last look."""
        for rank in list(self.ranks):
            if rank.asked_to_end or self._outlives(rank):
                continue
            failed = rank.ending is not None and rank.ending.code != 0
            reported = rank.alive and rank.report is not None and rank.rank not in self._failures
            if failed or reported:
                if not self._failures and LAUNCHER_SIGNAL is not None:
                    # While they still are where the failure found them.
                    self._dump_flight_records(LAUNCHER_SIGNAL)
                known = rank.rank in self._failures
                failure = self._failures[rank.rank] = _failure(rank)
                if not known:
                    self._tell_others(Kind.FAILED, **_told(failure))

    def _pass_ends_on(self) -> None:
        """Report each rank that has ended without a failure, once, while the job continues."""
        for rank in self.ranks:
            if not rank.alive and rank.rank not in self._failures:
                self._pass_end_on(rank)

    def _pass_end_on(self, rank: RankProcess) -> None:
        if self._stop_began is None and rank.pid not in self._ended:
            self._ended.add(rank.pid)
            if self.around.recovery is not None and rank.ending and rank.ending.code == 0:
                self.around.recovery.note_finished(rank.rank)
            self.around.on_end(rank)

    # Other hosts

    def _others_need_us(self) -> bool:
        """True while this launcher must stay, since other nodes run on without a failure."""
        link = self.around.link
        if link is None or self._stop_began is not None or self._failures:
            return False
        if not self._told_end and not any(rank.alive for rank in self.ranks):
            self._told_end = True
            link.tell(Kind.FINISHED)
        return link.awaits_others

    def _tell_others(self, kind: Kind, **facts: object) -> None:
        if self.around.link is not None:
            self.around.link.tell(kind, **facts)

    def _hear_others(self) -> None:
        """Act on messages of other nodes: the user ended the job, a rank failed, a node is lost."""
        for message in self.around.link.take() if self.around.link is not None else ():
            kind = message["kind"]
            if kind == Kind.INTERRUPTED and self._stop_began is None:
                self._interrupted = int(message["signal"])
                self.stop(signals.after_signal(self._interrupted, self.around.grace))
            elif kind == Kind.AGAIN and self._stop_began is None:
                self._begin_again()
            elif kind == Kind.FAILED and not self._begins_again:
                self._failures.setdefault(int(message["rank"]), self._failure_there(message))
            elif kind == Kind.LOST and self._stop_began is None:
                lost = self._node_lost(message)
                if message.get("enough") and self.around.recovery is not None:
                    self._outlived[-1 - lost.rank] = lost
                    self.around.recovery.note(None, f"{lost.node} is gone, with {lost.lost_node}")
                    self._tell(lost)
                else:
                    self._failures.setdefault(lost.rank, lost)
            elif kind == Kind.JOINED and self.around.recovery is not None:
                link, node = self.around.link, message["node"]
                assert link is not None
                come = f"{link.place_of(node)} has come, with {link.ranks_of(node)}"
                self.around.recovery.note(None, come)

    def _begin_again(self) -> None:
        """End this host's ranks, so that those of all hosts can be started again."""
        self._begins_again = True
        self.stop(signals.at_once())

    def _failure_there(self, message: Message) -> RankFailure:
        """The failure of a rank on another node, as that node's ``message`` reports it."""
        assert self.around.link is not None
        report, now = None, time.monotonic()
        if message["classes"]:
            classes = tuple(message["classes"])
            report = FailureReport(now, classes, message["summary"], "", message["code"])
        node = self.around.link.place_of(message["node"])
        return RankFailure(int(message["rank"]), now, int(message["code"]), report, node=node)

    def _node_lost(self, message: Message) -> RankFailure:
        link, node = self.around.link, int(message["node"])
        assert link is not None
        return RankFailure(
            link.first_rank(node),
            time.monotonic(),
            1,
            node=link.place_of(node),
            lost_node=link.ranks_of(node),
        )

    def _outlives(self, rank: RankProcess) -> bool:
        """True if recovery deals with this rank's failure, now or once the process has ended."""
        recovery = self.around.recovery
        if rank.pid in self._outlived or self._begins_again:
            return True
        if recovery is None or self._failures or self._stop_began is not None:
            return False
        if rank.ending is None:
            return rank.report is not None
        if rank.ending.code == 0:
            return False
        failure = _failure(rank)
        if failure.never_met and self._ends_unmet(recovery, failure):
            return True
        answer = self._answer(recovery, failure)
        self._outlived[rank.pid] = failure
        if answer is Answer.END:
            self._failures.update({each.rank: each for each in self._to_blame(failure)})
            return True
        self._tell(failure)
        if answer is Answer.RESTART:
            self.around.restart(rank)
        else:
            self._pass_end_on(rank)
        return True

    def _ends_unmet(self, recovery: Recovery, failure: RankFailure) -> bool:
        """End ranks that cannot meet the others, where hosts come and go, perhaps to begin again;
        False if their failure counts.
        """
        link = self.around.link
        if link is not None and link.may_begin_again:
            self._tell_others(Kind.AGAIN)
            self._begin_again()
            return True
        if link is not None and link.is_elastic and link.any_finished:
            recovery.note(failure.rank, "ended: the others have finished without it")
            self.stop(signals.at_once())
            return True
        return False

    def _answer(self, recovery: Recovery, failure: RankFailure) -> Answer:
        living = [each for each in self.ranks if each.alive and each.report is None]
        elsewhere = 0 if self.around.link is None else self.around.link.ranks_elsewhere
        answer = recovery.answer(failure, len(self.around.members(living)) + elsewhere)
        if answer is Answer.GO_ON and not living:
            recovery.note(None, "no rank is left on this host: other hosts go on without it")
            return Answer.END
        return answer

    def _to_blame(self, failure: RankFailure) -> list[RankFailure]:
        """The failures that ended the job: the given one, and the loss that caused it."""
        before = [each for each in self._outlived.values() if not each.is_consequence]
        if not failure.is_consequence or not before:
            return [failure]
        return [max(before, key=lambda each: each.time), failure]

    def _tell(self, failure: RankFailure) -> None:
        if failure not in self._told_failures:
            self._told_failures.append(failure)
            self.around.on_failure(failure)

    def _end_outsiders(self) -> None:
        """Once a rank has finished, end living ranks if none of them belongs to the group."""
        living = [rank for rank in self.ranks if rank.alive]
        finished = any(rank.ending and rank.ending.code == 0 for rank in self.ranks)
        link = self.around.link
        finished = finished or (link is not None and link.is_elastic and link.others_finished)
        recovery = self.around.recovery
        if recovery is None or self._stop_began is not None or not (living and finished):
            return
        if not self.around.members(living):
            for rank in living:
                recovery.note(rank.rank, "ended: the others have finished without it")
            self.stop(signals.at_once())

    @property
    def _has_finished_ranks(self) -> bool:
        """True while some ranks live, and all others have finished without failures."""
        if self._stop_began is not None or self._failures:
            return False
        endings = [rank.ending.code for rank in self.ranks if rank.ending is not None]
        return 0 < len(endings) < len(self.ranks) and not any(endings)

    def _blame_stopped(self) -> None:
        """Note ranks as failed that stay stopped for 10 s after all others have finished."""
        living = [rank for rank in self.ranks if rank.alive]
        link, now = self.around.link, time.monotonic()
        waits = self._has_finished_ranks and (link is None or link.others_finished)
        if not waits or not all(linux.is_stopped(rank.pid) for rank in living):
            self._stopped_since = None
            return
        self._stopped_since = self._stopped_since or now
        if now - self._stopped_since >= _STOPPED_SECONDS:
            for rank in living:
                self._failures[rank.rank] = RankFailure(rank.rank, now, -signal.SIGSTOP)

    def _dump_flight_records(self, number: int) -> None:
        """Send signal ``number`` to ranks that handle it, which makes them write flight records."""
        for rank in self.ranks:
            if rank.alive and rank.report is None and linux.catches(rank.pid, number):
                rank.signal(number)

    def _decide(self) -> None:
        """Decide which failure to blame, once no better candidate can come."""
        if not self._undecided:
            return
        failures = list(self._failures.values())
        if time.monotonic() >= settle_time(failures):
            self._root = root_cause(failures)
            self._tell(self._root)
            self.stop(signals.after_failure())

    def _step(self) -> None:
        while self._steps and self._stop_began is not None:
            step = self._steps[0]
            if time.monotonic() < self._stop_began + step.after:
                return
            self._steps.pop(0)
            for rank in self.ranks:
                if not (step.spare_failed and rank.rank in self._failures):
                    self._signal_rank(rank, step.signal)

    def _signal_rank(self, rank: RankProcess, number: int) -> None:
        if not rank.alive:
            return
        rank.asked_to_end = True
        if number == signal.SIGKILL:
            rank.signal_group(number)
            return
        rank.signal(number)
        rank.signal(signal.SIGCONT)  # a stopped rank could not obey


def _told(failure: RankFailure) -> Message:
    report = failure.report
    return {
        "rank": failure.rank,
        "code": failure.code,
        "classes": [] if report is None else list(report.classes),
        "summary": "" if report is None else report.summary,
    }


def _failure(rank: RankProcess) -> RankFailure:
    report, ending = rank.report, rank.ending
    code = ending.code if ending is not None else report.exit_code if report is not None else 1
    # A signal ended the rank, not the reported error, unless the exit code agrees with the report.
    moment = report.time if report is not None else ending.time if ending is not None else 0.0
    return RankFailure(rank.rank, moment, code, report, rank.crash_trace)
