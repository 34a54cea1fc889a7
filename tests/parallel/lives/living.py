"""Lives on ranks, compared with the plain model's."""

from __future__ import annotations

import tempfile
import threading
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from types import CodeType
from typing import Any

from torch import Tensor

import tilework.distributed as dist
from tests.parallel.lives.body import Body, Setting, Skip, UserError, Values
from tests.parallel.lives.drawing import Life, Unlike
from tests.parallel.lives.refusals import refusal
from tests.parallel.lives.ways import WAYS
from tests.parallel.sides import Side
from tests.rounding import assert_close
from tilework.errors import DistError
from tilework.testing import run_ranks

#: How long a rank waits for the others to raise as it did, in seconds.
PATIENCE = 5.0
#: For checkpoints.
_FOLDER = tempfile.TemporaryDirectory(prefix="lives-")


@dataclass
class Seen:
    """What came of an act."""

    values: Values = field(default_factory=dict)
    tolerance: float = 0.0
    error: Exception | None = None
    is_skipped: bool = False
    way: str = ""


@dataclass
class Outcome:
    """What came of a life: "right", "refused" or "wrong", and why."""

    life: Life
    kind: str
    why: str = ""
    done: list[str] = field(default_factory=list)


class _Ended(Exception):
    """This rank has another end of the life than the plain model."""


class _Names(Mapping[str, Any]):
    """The names that the text of an act knows: a body's methods."""

    def __init__(self, body: Body) -> None:
        self._body = body

    def __getitem__(self, name: str) -> Any:
        return {"inf": float("inf")}.get(name) or getattr(self._body, name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


@cache
def _compiled(act: str) -> CodeType:
    return compile(act, act, "eval")


def attempt(body: Body, act: str) -> Seen:
    """Do an act, and go on as users do if it raises."""
    seen = Seen()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seen.values = eval(_compiled(act), {"__builtins__": {}}, _Names(body)) or {}
    except Skip:
        seen.is_skipped = True
    except Exception as error:
        seen.error = error
    seen.tolerance, seen.way = body.tolerance, body.way
    return seen


def _may_go_on(seen: Seen, wanted: Seen) -> bool:
    """True if ranks need not raise as the plain model does.

    What a DTensor was gathered to for an operator is a copy: after a step gradients are still those
    of the values before it, where a plain tensor's are lost.
    """
    error = str(wanted.error)
    if "scalar type" in error or "different metadata" in error:  # of a cast, or a replaced tensor
        return True
    return seen.way == "distributed" and "modified by an inplace operation" in error


def _is_own(seen: Seen, wanted: Seen) -> bool:
    """True if ranks raise what the plain model does not."""
    if seen.error is None or wanted.error is None:
        return seen.error is not None
    return isinstance(wanted.error, UserError) and not isinstance(seen.error, UserError)


def _born(life: Life, setting: Setting, rank: int = 0) -> Body:
    other = life.unlike
    is_other = other is not None and other.kind == "is another" and other.rank == rank
    return Body(setting, life.way, life.seed + is_other, life.batch_norm, life.dtype)


def plain_life(life: Life) -> list[Seen]:
    """What the plain model's life gives, for each act."""
    body, found = _born(life, Setting(life.ranks, lambda way: Side(), True)), []
    for act in life.acts:
        found.append(attempt(body, act))
        if found[-1].error is not None:
            body.recover()
    return found


class _Sides:
    """The sides of ways on this rank: meshes are made once."""

    def __init__(self) -> None:
        self._made: dict[str, Side] = {}

    def __call__(self, way: str) -> Side:
        if way not in self._made:
            self._made[way] = WAYS[way].side()
        return self._made[way]


def _lead(life: Life, rank: int, sides: Any, expected: Sequence[Seen], found: list[Any]) -> None:
    """Lead a life on a rank, until it ends or has another end than the plain one."""
    folder = f"{_FOLDER.name}/{life.seed}"
    body = None
    for number, act in life.acts_of(rank):
        if body is None:
            try:
                setting = Setting(life.ranks, sides, False, folder, life.unlike is None)
                body = _born(life, setting, rank)
            except Exception as error:
                found.append((-1, Seen(error=error)))
                raise _Ended from error
        seen = attempt(body, act)
        found.append((number, seen))
        wanted = expected[number]
        if _is_own(seen, wanted) or (
            wanted.error is not None and seen.error is None and not _may_go_on(seen, wanted)
        ):
            raise _Ended from seen.error
        if wanted.error is not None:
            body.recover()


def run_lives(lives: Sequence[Life]) -> Iterator[Outcome]:
    """The outcome of each of these lives, which are all on as many ranks."""
    rest = list(lives)
    while rest:
        if rest[0].unlike is not None:
            yield _run_unlike(rest.pop(0))
            continue
        batch = rest[: next((n for n, life in enumerate(rest) if life.unlike), len(rest))]
        expected = [plain_life(life) for life in batch]
        found = _run_alike(batch, expected)
        ended = 0
        for life, wanted, of_ranks in zip(batch, expected, found, strict=True):
            if not all(of_ranks):
                break
            ended += 1
            yield _judged(life, wanted, of_ranks)
        assert ended, "no rank did anything"
        rest = rest[ended:]


def _run_alike(batch: Sequence[Life], expected: Sequence[list[Seen]]) -> list[list[list[Any]]]:
    """For each life and rank what was seen; nothing for the lives after one that went wrong."""
    ranks = batch[0].ranks
    found: list[list[list[Any]]] = [[[] for _ in range(ranks)] for _ in batch]
    gate = threading.Barrier(ranks)

    def program(rank: int) -> None:
        sides = _Sides()
        for life, wanted, records in zip(batch, expected, found, strict=True):
            try:
                _lead(life, rank, sides, wanted, records[rank])
            except _Ended:
                try:
                    gate.wait(PATIENCE)
                except threading.BrokenBarrierError:
                    records[rank].append((-2, Seen(error=RuntimeError("alone"))))
                raise

    errors = run_ranks(ranks, program, timeout=timedelta(seconds=60), return_exceptions=True)
    for rank, error in enumerate(errors):
        if isinstance(error, BaseException) and not isinstance(error, _Ended):
            last = next((r for r in reversed(found) if r[rank]), found[0])
            last[rank].append((-2, Seen(error=error)))
    return found


def _judged(life: Life, wanted: Sequence[Seen], of_ranks: Sequence[list[Any]]) -> Outcome:
    done = [
        life.acts[n].partition("(")[0] for n, seen in of_ranks[0] if n >= 0 and not seen.is_skipped
    ]
    if names := _refused(life, wanted, of_ranks):
        return Outcome(life, "refused", ", ".join(sorted(names)), done)
    if any(number == -2 for records in of_ranks for number, _ in records):
        texts = [_told(life, records) for records in of_ranks]
        return Outcome(life, "wrong", "the ranks do not end alike:\n" + "\n".join(texts), done)
    for rank, records in enumerate(of_ranks):
        for number, seen in records:
            if number == -1 or _is_own(seen, wanted[number]):
                text = _told(life, records)
                return Outcome(life, "wrong", f"rank {rank} raised\n{text}", done)
            other = wanted[number].error
            if seen.error is None and other is not None:
                if _may_go_on(seen, wanted[number]):
                    continue
                why = f"act {number}, {life.acts[number]}, raised nothing; the plain model: "
                return Outcome(life, "wrong", f"{why}{type(other).__name__}: {other}", done)
            why = difference(seen, wanted[number])
            if why:
                text = f"act {number}, {life.acts[number]}, on rank {rank}: {why}"
                return Outcome(life, "wrong", text, done)
    return Outcome(life, "right", "", done)


def _refused(life: Life, wanted: Sequence[Seen], of_ranks: Sequence[list[Any]]) -> set[str]:
    """What was refused, where some ranks raise that and others, at most, that they were left."""
    names = set()
    for records in of_ranks:
        for number, seen in records:
            if number == -2 or (number >= 0 and not _is_own(seen, wanted[number])):
                continue
            name = refusal(seen.error, life.acts[: number + 1])
            if name is not None:
                names.add(name)
            elif not isinstance(seen.error, DistError):
                return set()
    return names


def difference(seen: Seen, wanted: Seen) -> str:
    """What differs between an act's values; empty: nothing does."""
    if seen.is_skipped != wanted.is_skipped:
        return "skipped" if seen.is_skipped else "not skipped"
    if list(seen.values) != list(wanted.values):
        only = set(seen.values) ^ set(wanted.values)
        return f"other names: {sorted(only) or 'in another order'}"
    for name, value in wanted.values.items():
        mine = seen.values[name]
        if (mine is None) != (value is None):
            return f"{name} is {_short(mine)}, and should be {_short(value)}"
        try:
            if isinstance(value, Tensor):
                if name.endswith(".grad"):  # torch's has another dtype after a cast
                    value = value.to(mine.dtype)
                allowed = wanted.tolerance
                assert_close(mine, value, rtol=allowed, atol=allowed, equal_nan=True)
        except AssertionError as error:
            line = str(error).splitlines()[0]
            return f"{name} is {_short(mine)}, and should be {_short(value)} ({line})"
    return ""


def _short(value: Any) -> str:
    if not isinstance(value, Tensor):
        return str(value)
    return f"{[round(x, 6) for x in value.flatten()[:6].double().tolist()]} {value.dtype}"


def _told(life: Life, records: Sequence[tuple[int, Seen]]) -> str:
    """The last act of a rank, and its error."""
    lines = []
    for number, seen in records[-2:]:
        if seen.error is not None:
            act = life.acts[number] if number >= 0 else {-1: "wrapping", -2: "end"}[number]
            text = "".join(traceback.format_exception(seen.error)[-3:])
            lines.append(f"act {number}, {act}: {text}")
    return "\n".join(lines) or "no error"


# -- ranks that are not alike --------------------------------------------------------------------


def _run_unlike(life: Life) -> Outcome:
    """Right if all ranks raise, or all end with the plain model's values."""
    expected = plain_life(life)
    if any(seen.error is not None for seen in expected):
        return Outcome(life, "right")
    found: list[list[Any]] = [[] for _ in range(life.ranks)]
    done = [act.partition("(")[0] for act in life.acts]

    def program(rank: int) -> None:
        sides = _Sides()
        _lead(life, rank, sides, expected, found[rank])
        dist.barrier()

    errors = run_ranks(life.ranks, program, timeout=timedelta(seconds=120), return_exceptions=True)
    raised = [isinstance(error, BaseException) for error in errors]
    for rank, records in enumerate(found):
        seen = next((s for _, s in records if s.error is not None), None)
        if seen is not None and isinstance(seen.error, TimeoutError):
            return Outcome(life, "wrong", f"rank {rank} hung", done)
    if all(raised):
        return Outcome(life, "right", "", done)
    if any(raised):
        texts = [_told(life, records) for records in found]
        return Outcome(life, "wrong", "not all ranks raised:\n" + "\n".join(texts), done)
    if any(seen.is_skipped != expected[n].is_skipped for each in found for n, seen in each):
        return Outcome(life, "right", "a rank has left out another act, too", done)
    at = len(life.acts) - 2
    for rank, records in enumerate(found):
        last = [seen for number, seen in records if number == at][-1]
        if why := difference(_without_gradients(last), _without_gradients(expected[at])):
            return Outcome(life, "wrong", f"no rank raised, and on rank {rank} {why}", done)
    return Outcome(life, "right", "without effect", done)


def _without_gradients(seen: Seen) -> Seen:
    """Parameters and buffers: a rank may write to gradients as long as no step uses them."""
    values = {name: v for name, v in seen.values.items() if not name.endswith(".grad")}
    return replace(seen, values=values)


def live(way: str, *, acts: str, unlike: Unlike | None = None, **settings: Any) -> None:
    """Lead one life, as printed by ``python -m tests.parallel.lives``.

    Raises:
        AssertionError: It goes wrong.
    """
    texts = tuple(line.strip() for line in acts.splitlines() if line.strip())
    outcome = next(run_lives([Life(way=way, acts=texts, unlike=unlike, **settings)]))
    assert outcome.kind != "wrong", f"{outcome.life}\n{outcome.why}"
