"""A rank's flight record as a file: the contents, writing and reading.

One JSON document per rank. A reader trusts nothing: sizes, depths, types and numbers are checked,
and control characters of terminals are replaced.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Final, TypeVar

from tilework.comm.flight.ring import Entry

#: Increased by every change that an older reader would misunderstand.
VERSION: Final = 2
MAX_FILE_BYTES: Final = 16 << 20
#: The most entries of all groups together; the latest of each group are kept.
MAX_ENTRIES: Final = 4096
MAX_GROUPS: Final = 256
MAX_RANKS: Final = 1 << 16
MAX_STACKS: Final = 64
MAX_FRAMES: Final = 40
MAX_FAULTS: Final = 8
MAX_TEXT_CHARS: Final = 2000

_MARK: Final = "tilework_flight"
_Item = TypeVar("_Item")


class FlightRecordError(ValueError):
    """A file is not a readable flight record."""


@dataclass(frozen=True, slots=True)
class RecordedFault:
    """A fault on this rank, or the reason for writing the record."""

    #: Unix seconds.
    time: float
    #: The text of the error.
    text: str
    #: Global ranks at fault, as far as this rank knew.
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Stack:
    """The stack of a thread."""

    #: The name of the thread.
    thread: str
    #: ``file:line in function``, innermost first.
    frames: tuple[str, ...]
    #: The innermost frame of the user's code; "" if there is none.
    site: str
    #: True if the thread was inside tilework.
    inside: bool


@dataclass(frozen=True, slots=True)
class GroupLog:
    """A group as one rank sees it."""

    #: The name of the group.
    name: str
    #: The name of the backend.
    backend: str
    #: The description that the program gave to the group.
    description: str
    #: Global ranks, in the order of group ranks.
    ranks: tuple[int, ...]
    #: The last operations of this rank in the group, oldest first.
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Record:
    """The flight record of one rank."""

    #: The global rank.
    rank: int
    #: 0 without a default group.
    world_size: int
    #: The name of the host.
    host: str
    #: The id of the process.
    pid: int
    #: An id that is equal for ranks that were started together; "" if unknown.
    job: str
    #: The time of writing, in Unix seconds.
    written: float
    #: The faults that this rank has noticed, oldest first.
    faults: tuple[RecordedFault, ...]
    #: The rank's own thread first.
    stacks: tuple[Stack, ...]
    #: The groups of this rank.
    groups: tuple[GroupLog, ...]
    #: Steps of the program that the rank has counted.
    steps: int = 0


def file_name(rank: int) -> str:
    """The file name of a rank's record, in the folder with the records of all ranks."""
    return f"rank-{rank}.json"


def encode(record: Record) -> bytes:
    """The contents of a record's file."""
    document = {_MARK: VERSION, **asdict(record)}
    for group in document["groups"]:
        group["ranks"] = runs_of(group["ranks"])
    return json.dumps(_shortened(document), ensure_ascii=True, allow_nan=False).encode() + b"\n"


def decode(data: bytes) -> Record:
    """The record in a file; a FlightRecordError for others, cut off or of another version."""
    if len(data) > MAX_FILE_BYTES:
        raise FlightRecordError(f"the file has more than {MAX_FILE_BYTES >> 20} MiB")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FlightRecordError(f"the file is not JSON, or is cut off: {error}") from None
    if not isinstance(document, dict) or _MARK not in document:
        raise FlightRecordError("the file is not a flight record of tilework")
    if document[_MARK] != VERSION:
        raise FlightRecordError(
            f"the file is of version {_shown(document[_MARK])}, but this tilework reads version "
            f"{VERSION}: explain the record with the tilework that wrote it"
        )
    return _record(_Fields({"steps": 0, **document}, "the record"))


def _shortened(value: Any) -> Any:
    """``value`` with every string in it cut to the length that :func:`decode` accepts."""
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT_CHARS else f"{value[: MAX_TEXT_CHARS - 1]}…"
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_shortened(item) for item in value]
    return value


def runs_of(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """The first and last rank of each run of consecutive ranks, in order."""
    runs: list[tuple[int, int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], rank
        else:
            runs.append((rank, rank))
    return runs


@lru_cache(maxsize=64)  # the same in the records of all ranks
def _expanded(runs: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    if sum(last - first + 1 for first, last in runs) > MAX_RANKS:
        raise FlightRecordError(f"a group has more than {MAX_RANKS} ranks")
    return tuple(rank for first, last in runs for rank in range(first, last + 1))


# -- reading ---------------------------------------------------------------------------------


class _Fields:
    """A JSON object. Each method returns a field, or raises if the field has another type."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise FlightRecordError(f"{where} must be an object, got {_shown(value)}")
        self._value = value
        self._where = where

    def text(self, name: str) -> str:
        return _text(self._take(name), f"{name!r} of {self._where}")

    def integer(self, name: str, low: int, high: int) -> int:
        return _integer(self._take(name), low, high, f"{name!r} of {self._where}")

    def seconds(self, name: str) -> float:
        value = self._take(name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not abs(value) < 1e12:  # NaN is not, either
            self._refuse(name, "a time in seconds", value)
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._take(name)
        if not isinstance(value, bool):
            self._refuse(name, "true or false", value)
        return bool(value)

    def items(self, name: str, limit: int, read: Callable[[object], _Item]) -> tuple[_Item, ...]:
        value = self._take(name)
        if not isinstance(value, list) or len(value) > limit:
            self._refuse(name, f"a list of at most {limit}", value)
        return tuple(read(item) for item in value)

    def is_null(self, name: str) -> bool:
        return self._take(name) is None

    def _take(self, name: str) -> Any:
        try:
            return self._value[name]
        except KeyError:
            raise FlightRecordError(f"{self._where} lacks {name!r}") from None

    def _refuse(self, name: str, wanted: str, value: object) -> None:
        raise FlightRecordError(f"{name!r} of {self._where} must be {wanted}, got {_shown(value)}")


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT_CHARS:
        raise FlightRecordError(
            f"{where} must be a text of at most {MAX_TEXT_CHARS} characters, got {_shown(value)}"
        )
    return printable(value)


def _integer(value: object, low: int, high: int, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise FlightRecordError(
            f"{where} must be a whole number from {low} to {high}, got {_shown(value)}"
        )
    return value


def printable(text: str) -> str:
    """A text without control or unprintable characters, which are replaced."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def _shown(value: object) -> str:
    """``value``, from a file that nobody vouches for, as short printable text for an error."""
    text = printable(f"{value!r}" if not isinstance(value, list | dict) else type(value).__name__)
    return text if len(text) <= 40 else f"{text[:40]}…"


def _rank(value: object) -> int:
    return _integer(value, 0, MAX_RANKS, "a rank")


def _run(value: object) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise FlightRecordError(f"a range of ranks must be a pair of numbers, got {_shown(value)}")
    first, last = map(_rank, value)
    if last < first:
        raise FlightRecordError(
            f"a range of ranks must not end before it begins, got {first} to {last}"
        )
    return first, last


def _record(fields: _Fields) -> Record:
    return Record(
        rank=fields.integer("rank", 0, MAX_RANKS),
        world_size=fields.integer("world_size", 0, MAX_RANKS),
        host=fields.text("host"),
        pid=fields.integer("pid", 0, 1 << 32),
        job=fields.text("job"),
        written=fields.seconds("written"),
        faults=fields.items("faults", MAX_FAULTS, _fault),
        stacks=fields.items("stacks", MAX_STACKS, _stack),
        groups=fields.items("groups", MAX_GROUPS, _group),
        steps=fields.integer("steps", 0, 1 << 62),
    )


def _fault(value: object) -> RecordedFault:
    fields = _Fields(value, "a fault")
    ranks = fields.items("ranks", MAX_RANKS, _rank)
    return RecordedFault(fields.seconds("time"), fields.text("text"), ranks)


def _stack(value: object) -> Stack:
    fields = _Fields(value, "a stack")
    frames = fields.items("frames", MAX_FRAMES, lambda frame: _text(frame, "a frame"))
    return Stack(fields.text("thread"), frames, fields.text("site"), fields.flag("inside"))


def _group(value: object) -> GroupLog:
    fields = _Fields(value, "a group")
    return GroupLog(
        name=fields.text("name"),
        backend=fields.text("backend"),
        description=fields.text("description"),
        ranks=_expanded(fields.items("ranks", MAX_RANKS, _run)),
        entries=fields.items("entries", MAX_ENTRIES, _entry),
    )


def _entry(value: object) -> Entry:
    fields = _Fields(value, "an entry")
    return Entry(
        number=fields.integer("number", 0, 1 << 62),
        what=fields.text("what"),
        site=fields.text("site"),
        entered=fields.seconds("entered"),
        ended=None if fields.is_null("ended") else fields.seconds("ended"),
        outcome=fields.text("outcome"),
        peer=None if fields.is_null("peer") else fields.integer("peer", -1, MAX_RANKS),
        tag=fields.integer("tag", -(1 << 62), 1 << 62),
    )


def latest(entries: Sequence[Entry], limit: int) -> tuple[Entry, ...]:
    """The last ``limit`` entries, after at most ``limit`` earlier entries that still run."""
    cut = max(0, len(entries) - limit)
    running = [entry for entry in entries[:cut] if entry.outcome == "running"]
    return (*running[-limit:], *entries[cut:])
