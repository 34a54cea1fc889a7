"""A rank's life: what it does in each phase, and tells of it. Also a script for launchers."""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.chaos.life_plan import AFTER_ALL, LIMITS, LOSSES, PHASES, Life

Say = Callable[[Any], None]


#: The file by which a victim tells that it has come to the last call for which others need it.
LAST_CALL = "last-call"


@dataclass(frozen=True)
class Entered:
    """Said by the victim, when it enters its phase."""

    pid: int
    when: float


@dataclass(frozen=True)
class Lived:
    """A rank's report."""

    #: The phase that it came to.
    phase: str
    #: When it entered that, and when it left it.
    entered: float
    left: float
    #: The class and text of the error that ended it; empty if none did.
    kind: str = ""
    text: str = ""
    is_dist_error: bool = True
    ranks: tuple[int, ...] = ()
    #: Descriptors, mappings and threads that it has more than before.
    left_behind: str = ""


class Stages:
    """One rank's work in each phase."""

    def __init__(self, life: Life, rank: int, folder: Path, port: int) -> None:
        self.life, self.rank, self.folder, self.port = life, rank, folder, port
        self.store: Any = None
        self.groups: list[Any] = []
        self.forked = life.launcher == "fork"

    def run(self, phase: str) -> None:
        """Do what there is to do in a phase."""
        import torch

        import tilework.distributed as dist
        from tilework.mesh import init_device_mesh

        limit, x = timedelta(seconds=self.life.limit_in(phase)), torch.ones(5000)
        self._limit_groups(dist, limit)
        if phase == "rendezvous" and self.forked:
            self.store = self._make_store(dist, limit)
        elif phase == "bring-up" and self.forked:
            dist.init_process_group(
                "shm", store=self.store, rank=self.rank, world_size=self.life.n, timeout=limit
            )
        elif phase == "bring-up":
            dist.init_process_group("shm", timeout=limit)
        elif phase == "new_group":
            self.groups = [dist.new_group(range(self.life.n), limit) for _ in range(3)]
        elif phase == "mesh":
            init_device_mesh("cpu", (self.life.n,)).get_group()
        elif phase == "between":
            time.sleep(0.03)
            dist.barrier()
        elif phase == "operation":
            for _ in range(20):
                dist.all_reduce(x, group=self.groups[0])
                dist.broadcast(x, 0)
        elif phase == "coalescing":
            self._coalesce(dist, x)
        elif phase == "callback":
            self._call_back(dist, x)
        elif phase == "destroy":
            self.close()

    def _limit_groups(self, dist: Any, limit: timedelta) -> None:
        """Give the groups that there are the time that the victim's phase has."""
        default = [dist.group.WORLD] if dist.is_initialized() else []
        for group in [*default, *self.groups]:
            group.set_timeout(limit)
        if self.store is not None:
            self.store.set_timeout(limit)

    def _make_store(self, dist: Any, limit: timedelta) -> Any:
        if self.life.store == "file":
            return dist.FileStore(os.fspath(self.folder / "store"), self.life.n)
        is_master = self.rank == 0
        return dist.TCPStore("127.0.0.1", self.port, self.life.n, is_master, limit)

    def _coalesce(self, dist: Any, x: Any) -> None:
        for _ in range(5):
            with dist.coalescing_manager(group=self.groups[1], async_ops=True) as coalesced:
                for tensor in x.chunk(5):
                    dist.all_reduce(tensor, group=self.groups[1])
            coalesced.wait()

    def _call_back(self, dist: Any, x: Any) -> None:
        for _ in range(5):
            work = dist.all_reduce(x, async_op=True)
            work.get_future().then(lambda future: time.sleep(0.005)).wait()
        if self.rank == self.life.victim:
            (self.folder / LAST_CALL).touch()
        dist.barrier()

    def close(self) -> None:
        """Leave everything."""
        import tilework.distributed as dist

        self.groups.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
        if self.store is not None:
            self.store.close()
            self.store = None


def live(life: Life, rank: int, say: Say, folder: Path, port: int) -> None:
    """All phases of one rank; what it saw is said."""
    stages, before = Stages(life, rank, folder, port), None
    phase, entered, error = "", 0.0, None
    limitable = (resource.RLIMIT_NOFILE, resource.RLIMIT_AS)
    limits_before = {what: resource.getrlimit(what) for what in limitable}
    for phase in PHASES:
        if phase == "rendezvous" and stages.forked:
            before = holdings()
        if rank == life.victim and phase == life.phase:
            say(Entered(os.getpid(), time.monotonic()))
            strike(life)
        entered = time.monotonic()
        early = life.phase not in AFTER_ALL and life.fault in LOSSES
        if rank == life.victim and phase == "destroy" and early:
            say(Lived(phase, entered, entered))  # nobody needs to notice its loss any more
        try:
            stages.run(phase)
        except BaseException as caught:
            error = caught
            break
    left = time.monotonic()
    for limited, limits in limits_before.items():
        resource.setrlimit(limited, limits)
    try:
        stages.close()
        left_behind = more_than(before) if before is not None else ""
    except BaseException:
        left_behind = traceback.format_exc()
    if error is None:
        say(Lived(phase, entered, left, left_behind=left_behind))
        return
    from tilework.errors import DistError

    text = str(error) if isinstance(error, DistError) else repr(traceback.format_exception(error))
    ranks = tuple(getattr(error, "ranks", ()))
    is_dist_error = isinstance(error, DistError)
    kind = type(error).__name__
    say(Lived(phase, entered, left, kind, text, is_dist_error, ranks, left_behind))


def strike(life: Life) -> None:
    """What a rank does to itself; kills and stops come from outside."""
    if life.fault in LIMITS:
        if life.fault == "few files":
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free_descriptor(), most))
        else:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            least = pages * resource.getpagesize() + (1 << 20)
            resource.setrlimit(resource.RLIMIT_AS, (least, resource.RLIM_INFINITY))
    elif life.fault == "exec":
        after(life.delay, lambda: os.execvp("sleep", ["sleep", "30"]))
    elif life.fault == "exit":
        after(life.delay, lambda: os._exit(0))


def after(seconds: float, act: Callable[[], object]) -> None:
    """Do something from another thread, so that it may come within a call."""
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()


def lowest_free_descriptor() -> int:
    with socket.socket() as probe:
        return probe.fileno()


def holdings() -> Any:
    from tests.faults.forked_ranks import Holdings

    return Holdings.now()


def more_than(before: Any) -> str:
    """What is held after a while that was not before; "" for nothing."""
    from tests.chaos.rank_program import settled

    now = settled(before)
    return "" if now.within(before) else f"{before} before, {now} afterwards: {belongings()}"


def belongings() -> str:
    """The descriptors, mappings and threads of this process, in words."""
    from tilework.comm.per_call.callsite import stacks_of_threads

    files = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            files.append(f"{descriptor}: {os.readlink(f'/proc/self/fd/{descriptor}')}")
    maps = Path("/proc/self/maps").read_text().splitlines()
    shared = [line for line in maps if "memfd:" in line or "/dev/shm/" in line]
    stacks = stacks_of_threads()
    places = [
        f"{thread.name} {stacks[thread.ident][:3]}"
        for thread in threading.enumerate()
        if thread.ident in stacks
    ]
    names = len(os.listdir("/proc/self/task"))
    return f"descriptors {files}; mapped {shared}; {names} threads: {places}"


def main() -> None:
    """As a script of a launcher: reports go to files."""
    folder = Path(sys.argv[1])
    life: Life = pickle.loads((folder / "life").read_bytes())
    rank = int(os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"])

    def say(what: Any) -> None:
        name = folder / f"{type(what).__name__}-{rank}"
        name.with_suffix(".new").write_bytes(pickle.dumps(what))
        name.with_suffix(".new").rename(name)

    live(life, rank, say, folder, 0)


if __name__ == "__main__":
    # Its folder, which Python puts first, has names of the standard library's.
    sys.path[:] = [path for path in sys.path if Path(path) != Path(__file__).parent]
    # Classes are pickled by the name under which the driver knows them.
    from tests.chaos import life_program

    life_program.main()
