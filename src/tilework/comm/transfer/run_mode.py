"""The agreement of ranks before a plan runs: one small all_gather of each rank's facts.

All ranks learn that they run the same plan on the same dtype, whether every rank's memory fits one
collective unchanged, and the largest number of rounds that a rank needs. If a check fails on one
rank, all ranks raise, nothing has moved, and the group stays usable. The agreement costs
microseconds; ranks exchange words only after a failure (``comm.agreement``).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from tilework.comm import agreement
from tilework.comm.contract import ProcessGroup
from tilework.comm.operations import collectives
from tilework.comm.per_call.call_recorder import unrecorded
from tilework.errors import CollectiveMismatchError
from tilework.layout import Plan, Tiling

#: Flags of a rank's state: it refuses to run; one collective suffices; all its sends are equal.
_REFUSES, _SINGLE, _SAME_FOR_ALL = 1, 2, 4
#: The most tiles that a message names.
_MOST_TILES = 4


@dataclass(frozen=True, slots=True)
class RunMode:
    """A way to run a plan, as one rank proposes it, or as all ranks have agreed on it."""

    rounds: int
    """The number of rounds that keeps within the buffers."""
    single_collective: bool
    """True if one collective on unchanged tensors and outputs runs the plan."""
    same_for_all: bool
    """True if each rank sends the same elements to all other ranks."""


@unrecorded
def agree_on_mode(
    pg: ProcessGroup, plan: Plan, dtype: torch.dtype, device: torch.device, proposed: RunMode
) -> RunMode:
    """The mode that suits all ranks, of those they propose. Collective; raises if plans differ."""
    state = _SINGLE * proposed.single_collective + _SAME_FOR_ALL * proposed.same_for_all
    row = [plan.source.digest, plan.target.digest, zlib.crc32(str(dtype).encode())]
    rows = _exchange(pg, [*row, state, proposed.rounds], lambda: _words(plan, dtype), device)
    return RunMode(
        rounds=max(rounds for *_, rounds in rows),
        single_collective=all(state & _SINGLE for *_, state, _ in rows),
        same_for_all=all(state & _SAME_FOR_ALL for *_, state, _ in rows),
    )


def refuse(pg: ProcessGroup, error: Exception, device: torch.device) -> NoReturn:
    """Raise ``error``; other ranks' :func:`agree_on_mode` raises an error that names this rank."""

    def give_up() -> NoReturn:
        raise error

    _exchange(pg, [0, 0, 0, _REFUSES, 0], give_up, device)
    raise error


def _exchange(
    pg: ProcessGroup, row: list[int], words: Callable[[], str], device: torch.device
) -> list[list[int]]:
    """The ``row`` of each rank; raises if plans differ or a rank refuses. Collective."""
    device = torch.device("cpu") if device.type == "meta" else device  # of a pretended rank
    own = torch.tensor(row, dtype=torch.int64, device=device)
    gathered = torch.empty(pg.size() * len(row), dtype=torch.int64, device=device)
    collectives.all_gather_into_tensor(gathered, own, pg)
    rows: list[list[int]] = gathered.view(pg.size(), -1).tolist()
    odd = [rank for rank, other in enumerate(rows) if other[:3] != rows[0][:3]]
    if odd or any(state == _REFUSES for *_, state, _ in rows):
        by_rank = agreement.agree(words, pg)  # raises the error of a rank that refuses
        _raise_mismatch(pg, by_rank, [0, *odd])
    return rows


def _raise_mismatch(pg: ProcessGroup, by_rank: Sequence[str], at_fault: Sequence[int]) -> NoReturn:
    ranks = pg.global_ranks
    lines = [f"  rank {rank}: {words}" for rank, words in zip(ranks, by_rank, strict=True)]
    raise CollectiveMismatchError(
        f"rank {ranks[pg.rank()]}, group {pg.group_name!r}: ranks run different plans:\n"
        f"{chr(10).join(lines)}\nCall run_plan on every rank of the group, with the same source "
        f"and target and with tensors of one dtype. Nothing has moved.",
        ranks=[ranks[rank] for rank in at_fault],
    )


def _words(plan: Plan, dtype: torch.dtype) -> str:
    shape = f"{str(dtype).removeprefix('torch.')} {list(plan.source.shape)}"
    return f"{shape} from {_excerpt(plan.source)} to {_excerpt(plan.target)}"


def _excerpt(tiling: Tiling) -> str:
    """A tiling's first tiles, for a message."""
    tiles = [f"{tile.box} on {list(tile.owners)}" for tile in tiling.tiles[:_MOST_TILES]]
    more = len(tiling.tiles) - len(tiles)
    terms = f"{tiling.reduce_op} of {len(tiling.terms)} terms: " if tiling.reduce_op else ""
    return f"{terms}{', '.join(tiles)}{f' and {more} more tiles' if more else ''}"
