"""Orders of actions, read from a schedule's text and from torch's tables."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path

from tilework.parallel.pipelines.actions import LETTERS, Action, Kind, StageCost

_KINDS: dict[str, Kind] = {letter: kind for kind, letter in LETTERS.items()}
#: The kinds in torch's tables. Sends and receives, which follow from the order, are None.
_TORCH: dict[str, Kind | None] = {
    **{letter: _KINDS[letter] for letter in "FBIW"},
    "UNSHARD": "gather",
    "RESHARD": "free",
    "REDUCE_GRAD": "reduce",
    **dict.fromkeys(("SEND_F", "RECV_F", "SEND_B", "RECV_B")),
}
#: The word before the costs of stages in a text.
COSTS = "costs"


def read_text(written: str) -> tuple[list[list[Action]], list[StageCost]]:
    """The actions of each rank, and the costs if there are any, from a schedule's text."""
    rows: dict[int, list[Action]] = {}
    costs: list[StageCost] = []
    ranks = None
    for line in filter(str.strip, written.splitlines()):
        first, *words = line.split()
        if first == COSTS:
            costs = [_cost(each) for each in " ".join(words).split(";")]
        elif first == "rank" and words and words[0].isdecimal() and int(words[0]) not in rows:
            tokens = (token for word in words[1:] for token in word.split("+"))
            rank = int(words[0])
            rows[rank] = [_action(token, rank) for token in tokens if token.strip(".-")]
        elif words[:1] in (["rank,"], ["ranks,"]) and first.replace(",", "").isdecimal():
            ranks = int(first.replace(",", ""))
        elif first != "time":
            raise ValueError(
                f'got the line {line!r}; expected "rank", a number that no other line has, and the'
                " rank's actions"
            )
    return _by_rank(rows, ranks), costs


def _cost(told: str) -> StageCost:
    try:
        return StageCost(*map(float, told.split()))
    except (TypeError, ValueError):
        raise ValueError(f"costs: got {told.strip()!r}; expected up to three numbers") from None


def _action(token: str, rank: int) -> Action:
    match = re.fullmatch(r"(\d*)([A-Z])(\d*)", token)
    if match is None or match[2] not in _KINDS:
        raise ValueError(
            f"rank {rank}: got {token!r}; expected a letter of {' '.join(_KINDS)} between"
            ' the numbers of stage and microbatch, such as "2F0" or "F0"'
        )
    return Action(_KINDS[match[2]], int(match[1] or rank), int(match[3] or -1))


def _by_rank(rows: Mapping[int, list[Action]], ranks: int | None = None) -> list[list[Action]]:
    if not rows or sorted(rows) != list(range(ranks or len(rows))):
        raise ValueError(
            f"got actions of ranks {sorted(rows)}; expected a line for each rank from 0 on"
        )
    return [rows[rank] for rank in range(len(rows))]


def read_torch(order: object) -> list[list[Action]]:
    """The actions of each rank in a schedule of torch, a mapping by rank, or a file of them."""
    order = getattr(order, "pipeline_order", order)
    if isinstance(order, str | PathLike):
        with Path(order).open(newline="") as file:
            order = dict(enumerate(csv.reader(file)))
    if not (isinstance(order, Mapping) and all(isinstance(rank, int) for rank in order)):
        raise ValueError(
            f"order: got {type(order).__name__}; expected a schedule with a pipeline_order, a"
            " mapping from rank to actions, or the path of a file of comma-separated values"
        )
    return _by_rank({rank: list(_torch_row(row)) for rank, row in order.items()})


def _torch_row(row: Iterable[object]) -> Iterator[Action]:
    for cell in row:
        told = "" if cell is None else str(cell).strip()
        # Actions that torch overlaps are in parentheses; here they follow each other.
        overlap = re.fullmatch(r"\((.*)\)OVERLAP_F_B", told)
        for each in filter(None, (overlap[1] if overlap else told).split(";")):
            match = re.fullmatch(r"\s*(\d+)([A-Z_]+)(\d*)\s*", each)
            if match is None or match[2] not in _TORCH:
                raise ValueError(
                    f"got the action {each!r}; expected torch's form, such as 2F0 for the forward"
                    " of microbatch 0 in stage 2"
                )
            kind = _TORCH[match[2]]
            if kind is not None:
                yield Action(kind, int(match[1]), int(match[3] or -1))
