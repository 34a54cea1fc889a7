"""A job: the ranks of a program and all resources for them, with one owner."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from tilework.comm.launching import REJOIN_VARIABLE, InitGeneration, TicketStore
from tilework.errors import DistError
from tilework.launch import linux, orphans
from tilework.launch.binding import CpuSets, on_cpus
from tilework.launch.environment import Rendezvous, rank_environment
from tilework.launch.failure_report import RankFailure
from tilework.launch.nodes import NodePlace, Nodes, free_port
from tilework.launch.notebook import CellOutput
from tilework.launch.orphans import Guardian
from tilework.launch.output import Output, RankEnds
from tilework.launch.process import ForkStarter, FreshStarter, RankProcess, Standard, Starter
from tilework.launch.program import Function, Program
from tilework.launch.rank import RankPlan
from tilework.launch.rank_line import RankLine
from tilework.launch.recovery import Recovery
from tilework.launch.settings import LaunchSettings
from tilework.launch.signals import SignalInbox, TerminationStep
from tilework.launch.stdin import StandardInput
from tilework.launch.supervise import Endpoints, Outcome, Supervisor
from tilework.launch.sweep import MARK_VARIABLE
from tilework.rendezvous.internal import EndedRanks, launcher_store
from tilework.store import Store, StoreServer

_SECRET_BYTES = 32
#: The timeout of the launcher's own reads and writes of the store.
_STORE_TIMEOUT = timedelta(seconds=5)


@dataclass(frozen=True)
class Frontend:
    """The endpoints of ``tilework run``, whose creator closes them; started ranks have none."""

    output: Output
    stdin: StandardInput
    inbox: SignalInbox
    on_failure: Callable[[RankFailure], None]
    on_asked: Callable[[], None]
    #: The CPUs of each rank of this host, by local rank; empty: any.
    cpus: CpuSets = ()
    watch: RankLine | None = None


class Job:
    """Starts ranks, watches them, ends them and cleans up. A context manager.

    With a ``frontend`` this process is only the launcher: it passes output on and adopts the
    processes that ranks leave behind. Without, ranks share this process's stdio, or print to a
    notebook's ``cell``. ``threads`` is torch's number in each rank (None: as the user's environment
    says); ``nodes`` are the launchers on other hosts.
    """

    def __init__(
        self,
        settings: LaunchSettings,
        program: Program,
        threads: int | None,
        frontend: Frontend | None = None,
        cell: CellOutput | None = None,
        nodes: Nodes | None = None,
    ) -> None:
        self._settings = settings
        self._program = program
        self._threads = threads
        self._frontend = frontend
        self._cell = cell
        self._nodes = nodes
        self._place = NodePlace.alone(settings.nprocs) if nodes is None else nodes.place
        self._ranks: list[RankProcess] = []
        self._supervisor: Supervisor | None = None
        self._server: StoreServer | None = None
        self._guardian: Guardian | None = None
        self._rendezvous: Rendezvous | None = None
        self._folder: Path | None = None
        self._adopting = False
        self._ticket_store: TicketStore | None = None
        #: The store where the ranks meet, once the launcher has used it.
        self._store: Store | None = None
        #: How many events ranks had told before this launcher came.
        self._events_before = 0
        #: By process that is to be let in: how often groups had changed when it was started.
        self._newcomers: dict[int, int] = {}
        least = settings.elastic[0] if settings.elastic is not None else 1
        #: The policy for ranks that die; None: the job ends.
        self.recovery = Recovery(settings.restarts, least) if settings.outlives_ranks else None
        #: Killed processes that ranks had left running, as "1234 (name)".
        self.left_behind: list[str] = []

    def __enter__(self) -> Job:
        """Start every rank; if a start fails, end the started ranks.

        Raises OSError without more processes, descriptors or ports, TypeError if the program cannot
        be sent to fresh interpreters.
        """
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def supervise(self, timeout: timedelta | None = None) -> Outcome | None:
        """Wait until every rank has ended; blocks. None if ``timeout`` passes before."""
        assert self._supervisor is not None
        seconds = None if timeout is None else timeout.total_seconds()
        if not self._supervisor.run(seconds):
            return None
        if self.recovery is not None and self._ticket_store is not None:
            with contextlib.suppress(DistError):
                self.recovery.note_told(self._ticket_store.events()[self._events_before :])
        return self._supervisor.outcome

    def stop(self, steps: Sequence[TerminationStep], timeout: timedelta) -> None:
        assert self._supervisor is not None
        self._supervisor.stop(steps)
        self._supervisor.run(timeout.total_seconds())

    @property
    def pids(self) -> list[int]:
        return [rank.pid for rank in self._ranks]

    def close(self) -> None:
        """End every rank, wait for it, and remove everything made for the job. Idempotent."""
        with contextlib.ExitStack() as stack:  # every step, whatever the others raise; last first
            if self._folder is not None:
                stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
            for each in (self._guardian, self._server, self._store, self._cell):
                if each is not None:
                    stack.callback(each.close)
            self._ticket_store = None
            stack.callback(self._end_processes)

    # Starting

    def _start(self) -> None:
        rendezvous = self._prepare_rendezvous()
        results = self._program.folder if isinstance(self._program, Function) else None
        self._guardian = Guardian(self._folder, results)
        if self._frontend is not None:
            self._adopting = linux.adopt_orphans()
        with contextlib.closing(self._starter(rendezvous)) as starter:
            if self._place.begun and rendezvous.store is not None:
                self._store_at(rendezvous.store, rendezvous)
            for local_rank in range(self._settings.nprocs):
                rank = self._place.first_rank + local_rank
                rejoins = bool(self._place.begun) and self._rejoins(rank)
                self._start_rank(self._plan(rank, rendezvous, rejoins), starter)
        self._supervisor = Supervisor(self._ranks, self._endpoints())
        # Only now: a thread must not exist while forking.
        if self._cell is not None:
            self._cell.start()
        if self._server is not None:
            self._server.start()
        if self.recovery is not None and rendezvous.store is not None:
            self._ticket_store = TicketStore(self._store_at(rendezvous.store, rendezvous))
        if self._place.begun and self._ticket_store is not None:
            self._events_before = len(self._ticket_store.events())
            changes = len(self._changes())
            self._newcomers = {rank.pid: changes for rank in self._ranks}
        self._rendezvous = rendezvous

    def _store_at(self, place: str, rendezvous: Rendezvous) -> Store:
        if self._store is None:
            secret = bytes.fromhex(rendezvous.secret) or None
            self._store = launcher_store(place, _STORE_TIMEOUT, secret)
        return self._store

    def _note_end(self, rank: RankProcess) -> None:
        """Note in the store that ``rank`` has ended, for ranks that may wait for it."""
        rendezvous = self._rendezvous
        place = None if rendezvous is None else rendezvous.store or rendezvous.ends
        is_alone = self._place.world_size < 2 and not self._settings.several_hosts
        if rendezvous is None or place is None or is_alone:
            return
        with contextlib.suppress(DistError):
            EndedRanks(self._store_at(place, rendezvous)).add(rank.rank)

    def _restart(self, rank: RankProcess) -> None:
        assert self._rendezvous is not None
        rank.signal_group(signal.SIGKILL)  # processes that it has left running
        rank.reap()
        rejoins = self._rejoins(rank.rank)
        plan = self._plan(rank.rank, self._rendezvous, rejoins)
        changes = self._changes()
        # A fresh interpreter: this process has threads now, and must not fork.
        with contextlib.closing(FreshStarter(plan, self._program)) as starter:
            started = self._start_rank(plan, starter)
        self._ranks.remove(started)
        self._ranks[self._ranks.index(rank)] = started
        if rejoins:
            self._newcomers[started.pid] = len(changes)

    def _rejoins(self, rank: int) -> bool:
        """True if a new process of ``rank`` has to be let in by the others.

        False if the rank has never come: the others still wait, and take the new process for it.
        """
        if 0 < self._place.begun <= rank:
            return True
        with contextlib.suppress(DistError):
            return self._store is None or InitGeneration.has_come(self._store, rank)
        return True

    def _members(self, living: Sequence[RankProcess]) -> Sequence[RankProcess]:
        """Those of ``living`` that train: neither wait to be let in, nor were left behind."""
        events = self._changes()
        seats = set(events[-1]["seats"]) if events else set(range(self._place.world_size))

        def let_in(rank: RankProcess) -> bool:
            since = self._newcomers.get(rank.pid)
            return since is None or any(
                event["kind"] == "grown" and rank.rank in event["seats"] for event in events[since:]
            )

        return [rank for rank in living if rank.rank in seats and let_in(rank)]

    def _changes(self) -> list[dict[str, Any]]:
        """The changes of the group's members that ranks have told, oldest first."""
        with contextlib.suppress(DistError):
            if self._ticket_store is not None:
                return [event for event in self._ticket_store.events() if "seats" in event]
        return []

    def _prepare_rendezvous(self) -> Rendezvous:
        """The place where ranks meet: on a single host a new store server, to be started later."""
        if self._nodes is not None:
            return Rendezvous(self._nodes.secret, self._nodes.store_url, self._nodes.master)
        secret = secrets.token_bytes(_SECRET_BYTES)
        master = None
        if self._settings.master_port is not None:
            master = "127.0.0.1", self._settings.master_port or free_port("127.0.0.1")
        if sys.platform == "linux":
            address = f"@tilework-{secrets.token_hex(8)}"
        else:
            self._folder = Path(tempfile.mkdtemp(prefix="tilework-"))  # 0700
            address = str(self._folder / "store")
        self._server = StoreServer.listen_unix(address, secret)
        if master is not None and not self._settings.outlives_ranks:
            return Rendezvous(secret.hex(), master=master, ends=f"unix:{address}")
        return Rendezvous(secret.hex(), f"unix:{address}", master)

    def _starter(self, rendezvous: Rendezvous) -> Starter:
        if self._settings.start == "fork":
            return ForkStarter(self._program, whole_process=self._frontend is not None)
        return FreshStarter(self._plan(0, rendezvous), self._program)

    def _plan(self, rank: int, rendezvous: Rendezvous, rejoins: bool = False) -> RankPlan:
        environment = rank_environment(self._settings, rank, rendezvous, place=self._place)
        if rejoins:
            environment[REJOIN_VARIABLE] = "1"
        if self._guardian is not None:
            environment[MARK_VARIABLE] = self._guardian.mark
        return RankPlan(
            rank=rank,
            environment=environment,
            report_fd=-1,
            launcher=os.getpid(),
            # The kernel watches the starting thread; only the main thread surely lives on.
            dies_with_launcher=threading.current_thread() is threading.main_thread(),
            threads=self._threads,
        )

    def _start_rank(self, plan: RankPlan, starter: Starter) -> RankProcess:
        """Start the rank of ``plan``, and keep the launcher's ends of the pipes to it."""
        reader, writer = os.pipe()
        plan = dataclasses.replace(plan, report_fd=writer)
        ends, standard = None, Standard()
        if self._frontend is not None:
            ends = self._frontend.output.open(plan.rank)
            stdin = self._frontend.stdin.of(plan.rank)
            standard = Standard(stdin, ends.stdout, ends.stderr)
        elif self._cell is not None:
            ends = self._cell.open(plan.rank)
            standard = Standard(stdout=ends.stdout, stderr=ends.stderr)
        try:
            with on_cpus(self._cpus_of(plan.rank)):
                pid = starter.start(plan, standard, lambda: self._drop_in_child(reader, ends))
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
            if ends is not None:
                ends.close()
        started = RankProcess(plan.rank, pid, reader)
        self._ranks.append(started)
        if self._guardian is not None:
            self._guardian.watch(pid)
        return started

    def _cpus_of(self, rank: int) -> frozenset[int]:
        sets = () if self._frontend is None else self._frontend.cpus
        return sets[rank - self._place.first_rank] if sets else frozenset()

    def _drop_in_child(self, reader: int, ends: RankEnds | None) -> None:
        """In a forked rank, close the launcher's descriptors, and ``ends``, copied to 1 and 2."""
        os.close(reader)
        if ends is not None:
            ends.close()
        if self._guardian is not None:
            self._guardian.forget_in_child()
        for rank in self._ranks:
            rank.forget_in_child()
        if self._frontend is not None:
            self._frontend.output.close()
            self._frontend.stdin.close()
            self._frontend.inbox.forget_in_child()
        if self._cell is not None:
            self._cell.forget_in_child()

    def _endpoints(self) -> Endpoints:
        front = self._frontend
        if front is None:
            return Endpoints(on_end=self._note_end)
        own_children = self._own_children if self._adopting else None
        return Endpoints(
            front.output,
            front.stdin,
            front.inbox,
            front.on_failure,
            front.on_asked,
            self.recovery,
            self._restart,
            self._members,
            self._settings.grace.total_seconds(),
            self._note_end,
            own_children,
            None if self._nodes is None else self._nodes.link,
            front.watch,
        )

    # Ending

    def _own_children(self) -> list[int]:
        guardian = self._guardian.pid if self._guardian is not None else None
        return self.pids if guardian is None else [*self.pids, guardian]

    def _end_processes(self) -> None:
        """Kill and reap the living ranks, and then end processes that ranks have left behind."""
        failed = any(rank.ending is None or rank.ending.code != 0 for rank in self._ranks)
        for rank in self._ranks:
            # An ended rank stays in its group until reaped: this cannot hit strangers.
            # Where orphans are adopted there is a better way than by group: see below.
            if rank.alive or not self._adopting:
                rank.signal_group(signal.SIGKILL)
        for rank in self._ranks:
            rank.reap()
        if self._adopting:
            own = self._own_children()
            self.left_behind += orphans.end_orphans(
                0.0 if failed else orphans.PATIENCE_SECONDS, own
            )
            linux.adopt_orphans(False)
            self._adopting = False
