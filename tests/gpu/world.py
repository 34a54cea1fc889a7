"""Worlds of ranks that run a table of checks: on CUDA where there is a GPU.

A test starts the processes of one world, which run all checks of its module one after the other.
Each failure is noted and the rest goes on: with new groups after an error, in new processes after
a crash or a hang. Then the test fails once, and lists every failure.

``TILEWORK_GPU_TESTS=cpu`` runs the same checks on the CPU, to see that the checks are valid.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor

import tilework.distributed as dist
from tests.jobs import Job, Rank
from tilework.mesh import DeviceMesh, init_device_mesh

# Otherwise the question for GPUs would start CUDA here, and forked ranks could not use it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

#: Seconds for a world, for one check, and for one operation.
WORLD_SECONDS, CHECK_SECONDS, OPERATION_SECONDS = 55.0, 15.0, 6.0
#: Of a check that compiles: the first has to find out what the C++ compiler can do.
LONGEST_SECONDS = 150.0
#: The most frames and characters of an error in the list of failures.
_FRAMES, _CHARACTERS = 5, 1200


def device_type() -> str | None:
    """The kind of device that the checks run on; None if they are not to run."""
    return os.environ.get("TILEWORK_GPU_TESTS") or ("cuda" if torch.cuda.is_available() else None)


def require_device() -> None:
    """Skip the calling module where there is no GPU."""
    if device_type() is None:
        reason = "needs a GPU; TILEWORK_GPU_TESTS=cpu runs the checks on the CPU"
        pytest.skip(reason, allow_module_level=True)


@dataclass(frozen=True)
class World:
    """Ranks that share one GPU, and the backend of their default group.

    Attributes:
        backend: On a GPU; None: tilework's choice.
        on_cpu: The backend without a GPU.
        of_torch: True if torch.distributed makes the default group.
    """

    size: int
    backend: str | None
    on_cpu: str | None
    of_torch: bool = False

    def __str__(self) -> str:
        library = "torch, " if self.of_torch else ""
        return f"{library}{self.backend or 'default'}, {self.size} rank{'s'[: self.size > 1]}"


ONE = World(1, "cpu:shm,cuda:nccl", "shm")
ONE_DEFAULT = World(1, None, None)
TWO = World(2, "cpu:shm,cuda:gloo", "gloo")
THREE = World(3, "cpu:shm,cuda:gloo", "gloo")
TORCH_ONE = World(1, "cpu:tilework,cuda:nccl", "tilework", of_torch=True)


@dataclass
class Place:
    """A rank's view of its world, which each check is given."""

    world: World
    rank: int
    size: int
    kind: str
    folder: Path
    groups: int = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self.cuda else torch.device("cpu")

    @property
    def cuda(self) -> bool:
        return self.kind == "cuda"

    @property
    def backend(self) -> str | None:
        return self.world.backend if self.cuda else self.world.on_cpu

    def mesh(self, *shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
        """A mesh of all ranks, of one axis unless a shape is given."""
        return init_device_mesh(self.kind, shape or (self.size,), mesh_dim_names=names)

    def own_folder(self, name: str) -> Path:
        """A folder that all ranks share, for one check."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return folder

    def settle(self) -> None:
        """Wait for the device, so that its errors are those of this check."""
        if self.cuda:
            torch.cuda.synchronize()

    def join(self) -> None:
        """Make the default group."""
        self.groups += 1
        path = self.folder / f"store{self.groups}"
        limit = timedelta(seconds=OPERATION_SECONDS)
        if self.world.of_torch:
            torch_dist.init_process_group(
                self.backend,
                init_method=f"file://{path}",
                rank=self.rank,
                world_size=self.size,
                timeout=limit,
            )
            return
        store = dist.FileStore(os.fspath(path), self.size)
        dist.init_process_group(
            self.backend, store=store, rank=self.rank, world_size=self.size, timeout=limit
        )

    def abort(self) -> None:
        """Let the other ranks go that wait for this one."""
        with contextlib.suppress(Exception):
            if self.world.of_torch:
                torch_dist.distributed_c10d._abort_process_group()
            else:
                dist.abort_process_group()

    def leave(self) -> None:
        """Destroy all groups."""
        library: Any = torch_dist if self.world.of_torch else dist
        with contextlib.suppress(Exception):
            library.destroy_process_group()


def in_worlds(*worlds: World) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator: one test for each world, which has a little longer than its processes."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        marked = pytest.mark.timeout(LONGEST_SECONDS + 40)(test)
        decorated: Callable[..., None] = pytest.mark.parametrize("world", worlds, ids=str)(marked)
        return decorated

    return decorate


Check = Callable[[Place], None]


@dataclass
class Checks:
    """A table of named checks, filled by decorators: ``@CHECKS()`` or ``@CHECKS(1, 2)``."""

    table: dict[str, Check] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def __call__(
        self, *values: Any, seconds: float = CHECK_SECONDS
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """A decorator: one check, or one for each value, which the function takes then."""

        def add(fn: Callable[..., None]) -> Callable[..., None]:
            for value in values:
                text = getattr(value, "__name__", str(value)).removeprefix("torch.")
                self._add(f"{fn.__name__}[{text}]", functools.partial(_with, fn, value), seconds)
            if not values:
                self._add(fn.__name__, fn, seconds)
            return fn

        return add

    def _add(self, name: str, check: Check, seconds: float) -> None:
        assert name not in self.table, name
        self.table[name] = check
        self.seconds[name] = seconds


def _with(fn: Callable[..., None], value: Any, place: Place) -> None:
    fn(place, value)


# -- in a rank ------------------------------------------------------------------------------------


def _run_rank(rank: Rank, module: str, world: World, kind: str, names: Sequence[str]) -> str:
    checks: Checks = importlib.import_module(module).CHECKS
    os.environ["LOCAL_RANK"] = str(rank.number)
    place = Place(world, rank.number, rank.size, kind, rank.folder)
    if place.cuda:
        torch.cuda.set_device(place.device)
    place.join()
    rank.say.send("joined")
    for name in names:
        with _stacks(rank, checks.seconds[name]):
            began = time.monotonic()
            error = _run_check(checks.table[name], place, name)
        rank.say.send((error, time.monotonic() - began))
        if not _all_passed(place, name, error is None):
            place.leave()
            place.settle()  # raises where the device is lost: then others go on
            place.join()
    place.leave()
    return "left"


def _run_check(check: Check, place: Place, name: str) -> str | None:
    torch.manual_seed(len(name))
    try:
        check(place)
        place.settle()
    except BaseException as error:
        place.abort()
        return _short(error)
    return None


def _short(error: BaseException) -> str:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__, -_FRAMES))
    lines = [line for line in text.splitlines() if line.strip(" ^~")]
    text = "\n".join(line.replace("  File ", "  ") for line in lines)
    half = _CHARACTERS // 2
    return text if len(text) < _CHARACTERS else f"{text[:half]}\n…\n{text[-half:]}"


def _all_passed(place: Place, name: str, passed: bool) -> bool:
    """True if the check passed on every rank; ranks meet in files, which no error breaks."""
    folder = place.own_folder("passed")
    (folder / f"{name}.{place.rank}.new").write_text(str(passed))
    (folder / f"{name}.{place.rank}.new").rename(folder / f"{name}.{place.rank}")
    wanted = [folder / f"{name}.{rank}" for rank in range(place.size)]
    deadline = time.monotonic() + WORLD_SECONDS
    while not all(path.exists() for path in wanted):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the other ranks do not end {name}")
        time.sleep(0.001)
    return all(path.read_text() == "True" for path in wanted)


@contextlib.contextmanager
def _stacks(rank: Rank, seconds: float) -> Iterator[None]:
    """Write this rank's stacks to a file shortly before a check's time is up."""
    with (rank.folder / f"stacks{rank.number}").open("w") as file:
        faulthandler.dump_traceback_later(seconds - 1.0, file=file)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


# -- in the test ----------------------------------------------------------------------------------


@dataclass
class Outcome:
    """The end of a check: the errors by rank, and the longest time."""

    name: str
    errors: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0
    broken: bool = False

    def __str__(self) -> str:
        by_text: dict[str, list[int]] = {}
        for rank, error in self.errors.items():
            by_text.setdefault(error, []).append(rank)
        return "\n".join(
            f"--- {self.name}, rank {' and '.join(map(str, ranks))}, {self.seconds:.1f} s\n{text}"
            for text, ranks in by_text.items()
        )


def run_checks(module: str, world: World, folder: Path, only: Sequence[str] | None = None) -> None:
    """Run all checks of a test module, or some, in a world; fail with a list of those that fail."""
    kind = device_type()
    assert kind is not None
    checks: Checks = importlib.import_module(module).CHECKS
    # What takes longest comes last, so that it takes nothing from others.
    names = sorted(checks.table if only is None else only, key=lambda name: checks.seconds[name])
    outcomes = list[Outcome]()
    longest = checks.seconds[names[0]] if len(names) == 1 else 0.0
    deadline = time.monotonic() + max(WORLD_SECONDS, longest)
    while len(outcomes) < len(names) and time.monotonic() < deadline:
        attempt = folder / f"from{len(outcomes)}"
        attempt.mkdir()
        left = names[len(outcomes) :]
        outcomes += _attempt(Job(attempt, world.size, _run_rank, (module, world, kind, left)),
                             left, checks, deadline)  # fmt: skip
    failed = [outcome for outcome in outcomes if outcome.errors]
    slowest = sorted(outcomes, key=lambda outcome: -outcome.seconds)[:5]
    print(f"{module}, {world}, {kind}: {len(outcomes)} checks; slowest:",
          ", ".join(f"{o.name} {o.seconds:.1f} s" for o in slowest))  # fmt: skip
    missing = names[len(outcomes) :]
    if failed or missing:
        late = f"\n--- no time was left for {', '.join(missing)}" if missing else ""
        pytest.fail(
            f"{len(failed)} of {len(names)} checks failed ({world}, {kind}):\n"
            + "\n".join(map(str, failed))
            + late,
            pytrace=False,
        )


def _attempt(job: Job, names: Sequence[str], checks: Checks, deadline: float) -> list[Outcome]:
    """The outcomes up to the first check that ended or stopped a rank, at least one."""
    outcomes: list[Outcome] = []
    with job:
        joined = _hear_all(job, "(joining)", 20.0)
        if joined.broken:
            outcomes.append(Outcome(f"{names[0]} (joining)", joined.errors, broken=True))
        for name in () if joined.broken else names:
            seconds = min(checks.seconds[name], max(deadline - time.monotonic(), 0.5))
            outcomes.append(_hear_all(job, name, seconds + 2.0))
            if outcomes[-1].broken or time.monotonic() > deadline:
                break
        else:
            return outcomes
        for number, process in enumerate(job.processes):
            if process.exitcode is None:
                job.kill(number)
    return outcomes


def _hear_all(job: Job, name: str, seconds: float) -> Outcome:
    outcome, deadline = Outcome(name), time.monotonic() + seconds
    for number in range(job.n):
        try:
            said = job.hear(number, max(deadline - time.monotonic(), 0.2))
        except TimeoutError:
            stacks = job.folder / f"stacks{number}"
            text = stacks.read_text() if stacks.exists() else ""
            main = text.rpartition("\n\n")[2][:_CHARACTERS]  # the main thread comes last
            outcome.errors[number] = f"hangs:\n{main}" if text else "was not done when time was up"
            outcome.seconds = seconds
            outcome.broken = True
        except EOFError:
            job.processes[number].join(1)
            code = job.processes[number].exitcode
            outcome.errors[number] = f"the process ended with {code}"
            outcome.broken = True
        except AssertionError as error:
            outcome.errors[number] = str(error)[-_CHARACTERS:]
            outcome.broken = True
        else:
            if isinstance(said, tuple):
                error_text, took = said
                outcome.seconds = max(outcome.seconds, took)
                if error_text is not None:
                    outcome.errors[number] = error_text
    return outcome


# -- what checks compare with ---------------------------------------------------------------------


def close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    """Fail unless two values are close, on whatever devices; DTensors are gathered."""
    found, expected = plain(found), plain(expected)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def same(found: Any, expected: Any) -> None:
    """Fail unless two tensors have the same bits, on whatever devices."""
    torch.testing.assert_close(plain(found), plain(expected), rtol=0, atol=0, equal_nan=True)


def plain(value: Any) -> Tensor:
    """A tensor of any kind as a plain one on the CPU. Collective for a DTensor."""
    if hasattr(value, "full_tensor"):
        value = value.full_tensor()
    value = value.wait() if type(value).__name__ == "AsyncTensor" else value
    return torch.as_tensor(value).detach().cpu().clone()


def on_device(place: Place, *values: Any) -> None:
    """Fail unless tensors are on the device of the checks."""
    for value in values:
        assert value.device.type == place.kind, f"is on {value.device}"


@contextlib.contextmanager
def raising(words: str, *kinds: type[BaseException]) -> Iterator[None]:
    """Fail unless the block raises one of these errors, with these words in its message."""
    with pytest.raises(kinds or Exception) as caught:
        yield
    assert words.lower() in str(caught.value).lower(), repr(caught.value)


def lacking(words: str, fn: Callable[[], object]) -> bool:
    """True if a call raises NotImplementedError, whose message has to have these words."""
    try:
        fn()
    except NotImplementedError as error:
        text = str(error)
    else:
        return False
    assert words in text, text
    return True
