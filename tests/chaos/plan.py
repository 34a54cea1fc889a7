"""What happens in a trial: which groups, which operations, and what goes wrong. All from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch

from tests.random_programs import OPERATIONS, RandomOperation
from tilework.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistBackendError,
    PeerLostError,
)
from tilework.testing.groups.values import Case

Kind = Literal["processes", "threads"]
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
#: From one cache line to several rounds of the core.
SHAPES = ((5,), (3, 1000), (20_001,), (50_000,))

#: What others see of a rank that is lost, by how it gets lost.
LOST = {
    "kill": "is killed",
    "kill two": "are killed",
    "exit": "exits without a word",
    "leave": "leaves early",
    "raise": "raises with operations under way",
    "interrupt": "is interrupted by a signal whose handler raises",
    "vanish": "ends its thread without leaving",
}
LATE = {"stop": "is stopped", "late": "sleeps past the timeout"}
HARMLESS = {"pause": "is stopped and continued", "hesitate": "sleeps a little", "none": "-"}
AT_ODDS = {
    "operation": "calls another operation",
    "shape": "passes another shape",
    "dtype": "passes another dtype",
    "root": "names another root",
    "reduction": "reduces by another operation",
    "missing": "misses a call",
    "extra": "makes a call too many",
}
EARLY = {"kill early": "is killed while the groups are made"}
WORDS = {**LOST, **LATE, **HARMLESS, **AT_ODDS, **EARLY}

#: Sent to a process from outside, at a random moment.
SIGNALLED = ("kill", "kill two", "kill early", "stop", "pause")
FAULTS: dict[Kind, tuple[str, ...]] = {
    "processes": tuple(kind for kind in WORDS if kind != "vanish"),
    "threads": ("leave", "raise", "vanish", "late", "hesitate", "none", *AT_ODDS),
}
#: Late ones take as long as the timeout, so there are fewer of them.
_WEIGHTS = {"kill": 12, "kill two": 4, "kill early": 2, "stop": 2, "late": 1, "none": 1}


@dataclass(frozen=True)
class Batch:
    """Operations of one group that are started together and then waited for."""

    group: int
    steps: tuple[RandomOperation, ...]


@dataclass(frozen=True)
class Fault:
    """What goes wrong."""

    kind: str
    victims: tuple[int, ...]
    #: The batch at which the victim acts, where it is not a signal.
    at: int
    #: When the signal comes, after all ranks are ready.
    after: float
    #: What the victim calls instead of, or before, its first step of that batch.
    call: RandomOperation | None = None


@dataclass(frozen=True)
class Trial:
    """One trial."""

    seed: int
    n: int
    #: Global ranks; the first is the default group.
    groups: tuple[tuple[int, ...], ...]
    batches: tuple[Batch, ...]
    fault: Fault
    #: Whether a timer's signal comes to every rank all the time.
    ticking: bool = False

    @property
    def expected(self) -> type[DistBackendError] | None:
        """What is raised in each doomed group."""
        kind = self.fault.kind
        if kind in AT_ODDS:
            return CollectiveMismatchError
        if kind in LATE:
            return CollectiveTimeoutError
        return PeerLostError if kind in LOST else None

    @property
    def doomed(self) -> tuple[int, ...]:
        """The groups that must fail; all others must not, unless making the groups fails."""
        if self.expected is None and self.fault.kind not in EARLY:
            return ()
        if self.fault.kind in (*AT_ODDS, "late"):
            return (self.batches[self.fault.at].group,)
        victims = set(self.fault.victims)
        return tuple(i for i, ranks in enumerate(self.groups) if victims & set(ranks))

    @property
    def gone(self) -> tuple[int, ...]:
        """Ranks that do not come back."""
        lasting = ("kill", "kill two", "kill early", "exit", "vanish")
        return self.fault.victims if self.fault.kind in lasting else ()

    @property
    def timeout(self) -> float:
        """Seconds that an operation may wait in a doomed group."""
        if self.fault.kind in LATE:
            return 1.0
        return 2.0 if self.fault.kind in EARLY else 20.0

    def __str__(self) -> str:
        """The program in words."""
        fault = self.fault
        who = " and ".join(f"rank {rank}" for rank in fault.victims)
        when = f"after {fault.after * 1e3:.2f} ms" if fault.kind in SIGNALLED else f"at {fault.at}"
        lines = [f"trial {self.seed}: {self.n} ranks, {who} {WORDS[fault.kind]} {when}"]
        if self.ticking:
            lines.append("  a signal comes to every rank every 10 ms")
        lines += [f"  group {i}: ranks {list(ranks)}" for i, ranks in enumerate(self.groups)]
        if fault.call:
            lines.append(f"  the other call: {_describe(fault.call)}")
        lines += [
            f"  {i}: group {batch.group}: {', '.join(map(_describe, batch.steps))}"
            for i, batch in enumerate(self.batches)
        ]
        return "\n".join(lines)


def _describe(step: RandomOperation) -> str:
    case, flag = step.case, " async" if step.async_op else ""
    dtype = str(case.dtype).removeprefix("torch.")
    return f"{step.operation}({dtype}{list(case.shape)} root {step.root} {step.reduction}{flag})"


def draw_trial(seed: int, faults: tuple[str, ...]) -> Trial:
    """The trial that ``seed`` stands for, with one of ``faults``."""
    draw = random.Random(seed)
    fault = draw.choices(faults, [_WEIGHTS.get(name, 3) for name in faults])[0]
    n = draw.choice([3, 4]) if fault == "kill two" else draw.choice([2, 3, 4])
    everybody = tuple(range(n))
    subsets = [tuple(sorted(draw.sample(everybody, draw.randint(2, n)))) for _ in range(2)]
    groups = (everybody, *subsets[: draw.randint(0, 2)])
    # A ring makes a rank wait for one that waits for the late one, which it cannot name.
    operations = sorted(set(OPERATIONS) - ({"ring"} if fault in LATE else set()))
    batches = [_batch(draw, groups, operations) for _ in range(draw.randint(5, 25))]
    at = draw.randrange(len(batches))
    members = groups[batches[at].group]
    victims = tuple(
        draw.sample(everybody if fault in SIGNALLED else members, 1 + (fault == "kill two"))
    )
    call = None
    if fault in AT_ODDS:
        call, follow = _disagree(draw, fault, len(members))
        batches[at : at + 1] = [Batch(batches[at].group, (step,)) for step in follow]
    acts = Fault(fault, victims, at, draw.uniform(0, 0.03), call)
    return Trial(seed, n, groups, tuple(batches), acts, ticking=draw.random() < 0.2)


def _batch(
    draw: random.Random, groups: tuple[tuple[int, ...], ...], operations: list[str]
) -> Batch:
    index = draw.randrange(len(groups))
    size = len(groups[index])
    return Batch(index, tuple(_step(draw, size, operations) for _ in range(draw.randint(1, 3))))


def _step(draw: random.Random, size: int, operations: list[str]) -> RandomOperation:
    return RandomOperation(
        operation=draw.choice(operations),
        case=Case(draw.choice(SHAPES), draw.choice(DTYPES)),
        root=draw.randrange(size),
        reduction=draw.choice(["SUM", "MAX"]),
        async_op=draw.random() < 0.4,
        seed=draw.randrange(10),
    )


def _disagree(
    draw: random.Random, fault: str, size: int
) -> tuple[RandomOperation | None, tuple[RandomOperation, RandomOperation]]:
    """What the victim calls, where the others make two calls of different kinds."""
    suitable = {
        "shape": ["all_reduce", "broadcast", "reduce"],
        "root": ["broadcast", "reduce", "gather", "scatter"],
        "reduction": ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"],
        "dtype": ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"],
    }.get(fault, ["all_reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all"])
    step = replace(_step(draw, size, suitable), async_op=False)
    after = replace(step, operation="gather" if step.operation == "scatter" else "scatter")
    return _ALTERED[fault](step, size), (step, after)


def _other_shape(step: RandomOperation, size: int) -> RandomOperation:
    """As many bytes, or a few more, by turns."""
    shape = step.case.shape
    other = (*shape, 1) if step.seed % 2 else (shape[0] + 1, *shape[1:])
    return replace(step, case=replace(step.case, shape=other))


def _other_dtype(step: RandomOperation, size: int) -> RandomOperation:
    dtypes = {torch.float32: torch.int32, torch.int64: torch.float64}
    dtype = dtypes.get(step.case.dtype, torch.float16)
    return replace(step, case=replace(step.case, dtype=dtype))


_ALTERED: dict[str, Callable[[RandomOperation, int], RandomOperation | None]] = {
    "operation": lambda step, size: replace(step, operation="barrier"),
    "shape": _other_shape,
    "dtype": _other_dtype,
    "root": lambda step, size: replace(step, root=(step.root + 1) % size),
    "reduction": lambda step, size: replace(
        step, reduction="MAX" if step.reduction == "SUM" else "SUM"
    ),
    "missing": lambda step, size: None,
    "extra": lambda step, size: replace(step, operation="barrier"),
}
