"""Trials of whole lives: forked ranks, or a launcher's, of which one is struck in a phase."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.expected import NOTICE_SECONDS
from tests.chaos.life_plan import AFTER_ALL, LIMITS, LONGEST_SECONDS, LOSSES, Life
from tests.chaos.life_program import LAST_CALL, Entered, Lived, live
from tests.faults.forked_ranks import ForkedRanks, Holdings, Say

_CLONE_NEWPID = 0x2000_0000
#: From the start of a launcher to its end, with the imports of torch on a busy machine.
LAUNCHED_SECONDS = 90.0
#: From a rank's end to that of all processes that a launcher has started.
ENDING_SECONDS = 15.0


class TrialError(Exception):
    """A trial did not come as far as its fault."""


@dataclass
class LifeOutcome:
    """What came of a trial."""

    life: Life
    reports: dict[int, Lived] = field(default_factory=dict)
    struck: float | None = None
    #: True if the victim had done its part for all others before it was struck.
    came_to_last_call: bool = False
    trouble: str = ""

    def notices(self) -> dict[int, float]:
        """Seconds until each survivor knew, from when it was struck or began to wait."""
        if self.struck is None:
            return {}
        return {
            rank: max(0.0, report.left - max(self.struck, report.entered))
            for rank, report in self.reports.items()
            if rank != self.life.victim and report.kind
        }

    def violations(self) -> list[str]:
        """Everything that is not as it must be."""
        if self.trouble:
            return [self.trouble]
        found = [
            f"rank {rank} noticed after {seconds:.2f} s"
            for rank, seconds in self.notices().items()
            if seconds > self.longest(self.reports[rank].phase)
        ]
        for rank, report in self.reports.items():
            found += self._wrong(rank, report)
        return found

    def longest(self, phase: str) -> float:
        """Seconds after which a rank in a phase must have noticed."""
        return NOTICE_SECONDS + (0.0 if self.life.is_noticed else self.life.limit_in(phase))

    def _wrong(self, rank: int, report: Lived) -> Iterator[str]:
        life = self.life
        if not report.is_dist_error:
            yield f"rank {rank} failed by itself in {report.phase}: {report.text}"
        if report.left_behind:
            yield f"rank {rank} left something behind: {report.left_behind}"
        if life.fault == "none" and report.kind:
            yield f"rank {rank} raised {report.kind} in {report.phase}: {report.text}"
        if rank == life.victim or life.fault in (*LIMITS, "none", "stop"):
            return
        is_needed = not self.came_to_last_call and life.victim not in self.reports
        if life.phase not in AFTER_ALL and not report.kind and is_needed:
            yield f"rank {rank} did not notice anything"
        if report.kind == "PeerLostError" and life.victim not in report.ranks:
            yield f"rank {rank} names {report.ranks}: {report.text}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def strangers(port: int, seed: int) -> Iterator[None]:
    """Connections to the store's port by somebody else: silent ones, and some that send noise."""
    draw, over = random.Random(seed), threading.Event()

    def disturb() -> None:
        with contextlib.ExitStack() as stack:
            while not over.wait(0.002):
                guest = stack.enter_context(socket.socket())
                with contextlib.suppress(OSError):
                    guest.settimeout(0.5)
                    guest.connect(("127.0.0.1", port))
                    if draw.random() < 0.5:
                        guest.sendall(draw.randbytes(draw.randint(1, 300)))
                if len(stack._exit_callbacks) > 30:  # type: ignore[attr-defined]
                    stack.close()

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Lives:
    """Trials, one after the other, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def run(self, life: Life) -> LifeOutcome:
        """One trial."""
        outcome, folder = LifeOutcome(life), self._folder / f"life-{life.seed}"
        folder.mkdir()
        before = Holdings.now()
        try:
            if life.launcher == "fork":
                self._fork(life, folder, outcome)
            else:
                self._launch(life, folder, outcome)
        except Exception:
            outcome.trouble = traceback.format_exc()
        outcome.came_to_last_call = (folder / LAST_CALL).exists()
        shutil.rmtree(folder)
        if not outcome.trouble and Holdings.now().descriptors > before.descriptors:
            outcome.trouble = f"the driver held {before} before and {Holdings.now()} afterwards"
        return outcome

    # -- forked ranks --------------------------------------------------------------------

    def _fork(self, life: Life, folder: Path, outcome: LifeOutcome) -> None:
        port = free_port()
        tell = story(life, folder, port)
        with contextlib.ExitStack() as stack:
            if life.condition == "strangers" and life.store == "tcp":
                stack.enter_context(strangers(port, life.seed))
            ranks = stack.enter_context(ForkedRanks(life.n, tell))
            try:
                self._play(life, ranks, outcome)
            finally:
                for rank in ranks:
                    with contextlib.suppress(ProcessLookupError):
                        if rank.status is None:
                            rank.kill(signal.SIGCONT)
                            rank.kill()

    def _play(self, life: Life, ranks: ForkedRanks, outcome: LifeOutcome) -> None:
        entered = ranks[life.victim].hear(LONGEST_SECONDS)
        if not isinstance(entered, Entered):
            raise TrialError(f"the victim did not come to its phase: {entered}")
        strike(life, entered, outcome)
        ended = life.fault in LOSSES
        patience = 2 * LONGEST_SECONDS + 10
        for number, rank in enumerate(ranks):
            if number != life.victim:
                outcome.reports[number] = rank.hear(patience)
        if life.fault == "stop":
            with contextlib.suppress(ProcessLookupError):  # it had ended before
                os.kill(entered.pid, signal.SIGCONT)
        if not ended:
            outcome.reports[life.victim] = ranks[life.victim].hear(patience)
        with contextlib.suppress(EOFError):
            if ended and ranks[life.victim].pipe.poll():
                outcome.reports[life.victim] = ranks[life.victim].hear()
        if life.fault == "exec":
            with contextlib.suppress(ProcessLookupError):
                os.kill(entered.pid, signal.SIGKILL)

    # -- launched ranks ------------------------------------------------------------------

    def _entered(self, life: Life, folder: Path, deadline: float) -> Entered:
        entered, lived = (folder / f"{what}-{life.victim}" for what in ("Entered", "Lived"))
        while not entered.exists():
            if lived.exists() and not entered.exists():
                report = pickle.loads(lived.read_bytes())
                raise TrialError(f"the victim did not come to its phase: {report}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing was said in {entered.name}")
            time.sleep(0.005)
        told: Entered = pickle.loads(entered.read_bytes())
        return told

    def _launch(self, life: Life, folder: Path, outcome: LifeOutcome) -> None:
        (folder / "life").write_bytes(pickle.dumps(life))
        mark = f"TILEWORK_CHAOS={folder}"
        processes = [
            subprocess.Popen(
                command,
                env={**os.environ, **extra, "TILEWORK_CHAOS": str(folder), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            for command, extra in commands(life, folder)
        ]
        deadline = time.monotonic() + LAUNCHED_SECONDS
        try:
            entered = self._entered(life, folder, deadline)
            strike(life, entered, outcome)
            if life.fault == "stop":
                time.sleep(life.limit + 1)
                with contextlib.suppress(ProcessLookupError):  # the launcher may have ended it
                    os.kill(entered.pid, signal.SIGCONT)
            if life.fault == "exec":  # launchers of others wait for the other program
                time.sleep(NOTICE_SECONDS + (0.0 if life.is_noticed else life.limit))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(entered.pid, signal.SIGKILL)
            until = time.monotonic() + ENDING_SECONDS + 2 * life.limit
            for process in processes:
                process.wait(max(0.1, until - time.monotonic()))
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        for rank in range(life.n):
            path = folder / f"Lived-{rank}"
            if path.exists():
                outcome.reports[rank] = pickle.loads(path.read_bytes())
        if left := left_over(mark, life):
            outcome.trouble = f"these processes are left: {left}"


def strike(life: Life, entered: Entered, outcome: LifeOutcome) -> None:
    """End or stop the victim from outside, where it does not do so itself."""
    signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
    if life.fault in signals:
        time.sleep(max(0.0, entered.when + life.delay - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):
            os.kill(entered.pid, signals[life.fault])
        outcome.struck = time.monotonic()
    elif life.fault != "none":
        outcome.struck = entered.when + (0.0 if life.fault in LIMITS else life.delay)


def story(life: Life, folder: Path, port: int) -> Callable[[int, Say], None]:
    """What each forked rank does."""

    def tell(rank: int, say: Say) -> None:
        if life.condition == "pid namespace" and rank == life.victim:
            live_in_namespace(life, rank, say, folder, port)
        else:
            live(life, rank, say, folder, port)

    return tell


def live_in_namespace(life: Life, rank: int, say: Say, folder: Path, port: int) -> None:
    """A life as the first process of a pid namespace; its number outside is told in its stead."""
    if ctypes.CDLL(None).unshare(_CLONE_NEWPID) != 0:
        return live(life, rank, say, folder, port)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reader, 1)  # until its number is known
        number = int.from_bytes(os.read(reader, 8), "little")
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        live(life, rank, lambda what: say(renumbered(what, number)), folder, port)
        os._exit(0)
    os.write(writer, b"." + child.to_bytes(8, "little"))
    os.close(writer)
    os.close(reader)
    os.waitpid(child, 0)
    return None


def renumbered(what: Any, number: int) -> Any:
    return Entered(number, what.when) if isinstance(what, Entered) else what


def commands(life: Life, folder: Path) -> list[tuple[list[str], dict[str, str]]]:
    """The processes that a launcher is, each with its environment."""
    n, python = str(life.n), sys.executable
    script = [str(Path(__file__).with_name("life_program.py")), str(folder)]
    root = str(Path(__file__).parents[2])
    paths = {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    if life.launcher == "tilework run":
        start = [python, "-c", "from tilework.cli import main; main()", "run", "-n", n]
        return [([*start, *script], paths)]
    if life.launcher == "torchrun":
        port = f"--master-port={free_port()}"
        start = [python, "-m", "torch.distributed.run", f"--nproc-per-node={n}", port]
        return [([*start, *script], paths)]
    if life.launcher == "mpirun":
        start = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", n, python]
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        return [([*start, *script], {**paths, **address})]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": n}
    return [([python, *script], {**paths, **address, "RANK": str(r)}) for r in range(life.n)]


def left_over(mark: str, life: Life, seconds: float = NOTICE_SECONDS) -> list[str]:
    """Processes of a trial that are there after its launcher's end, but for what exec has made."""
    deadline = time.monotonic() + seconds
    while True:
        found = [
            text
            for path in Path("/proc").glob("[0-9]*/environ")
            if (text := command_of(path, mark)) and not text.startswith("sleep")
        ]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.02)


def command_of(environ: Path, mark: str) -> str:
    """The command of a process with this mark in its environment; "" if it is another."""
    with contextlib.suppress(OSError):
        if mark.encode() in environ.read_bytes():
            return (environ.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""
