"""Before a plan runs, ranks compare what they are about to run: one small all_gather.

It tells every rank that all run the same plan on the same dtype, whether all have memory that one
collective can use as it is, and how many rounds the rank needs that needs most. If something is
wrong on one rank, all raise, nothing has moved, and the group goes on. That costs microseconds;
words are exchanged only when something is wrong (``comm.agreement``).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

from tilework.comm import agreement, collectives
from tilework.comm.contract import ProcessGroup
from tilework.errors import CollectiveMismatchError
from tilework.layout import Plan, Tiling

_REFUSED, _STRAIGHT, _SPREAD = 1, 2, 4
#: How many tiles a message names.
_TILES_TOLD = 4


@dataclass(frozen=True, slots=True)
class RunMode:
    """How a plan is run; what one rank proposes, or what suits all."""

    rounds: int
    """As many as are needed to stay within the buffers."""
    straight: bool
    """Whether one collective does it, on tensors and outputs as they are."""
    spread: bool
    """Whether what a rank sends is the same for all ranks."""


def agree(
    pg: ProcessGroup, plan: Plan, dtype: torch.dtype, device: torch.device, terms: RunMode
) -> RunMode:
    """The terms that suit every rank. Collective.

    Raises:
        CollectiveMismatchError: On every rank: ranks run different plans.
        Exception: On every rank: one refuses to run its plan.
    """
    state = _STRAIGHT * terms.straight + _SPREAD * terms.spread
    row = [plan.source.digest, plan.target.digest, zlib.crc32(str(dtype).encode())]
    rows = _exchange(pg, [*row, state, terms.rounds], lambda: _words(plan, dtype), device)
    return RunMode(
        rounds=max(rounds for *_, rounds in rows),
        straight=all(state & _STRAIGHT for *_, state, _ in rows),
        spread=all(state & _SPREAD for *_, state, _ in rows),
    )


def refuse(pg: ProcessGroup, error: Exception, device: torch.device) -> NoReturn:
    """Raise ``error``, here and on the others, who are about to agree. Collective."""

    def give_up() -> NoReturn:
        raise error

    _exchange(pg, [0, 0, 0, _REFUSED, 0], give_up, device)
    raise error


def _exchange(
    pg: ProcessGroup, row: list[int], say: Callable[[], str], device: torch.device
) -> list[list[int]]:
    """Every rank's row, if they are the same plan's and nobody refuses."""
    mine = torch.tensor(row, dtype=torch.int64, device=device)
    all_of = torch.empty(pg.size() * len(row), dtype=torch.int64, device=device)
    collectives.all_gather_into_tensor(all_of, mine, pg)
    rows: list[list[int]] = all_of.view(pg.size(), -1).tolist()
    odd = [rank for rank, other in enumerate(rows) if other[:3] != rows[0][:3]]
    if odd or any(state == _REFUSED for *_, state, _ in rows):
        said = agreement.agree(say, pg)  # raises what a rank refused for
        _raise_mismatch(pg, said, [0, *odd])
    return rows


def _raise_mismatch(pg: ProcessGroup, said: Sequence[str], at_fault: Sequence[int]) -> NoReturn:
    ranks = pg.global_ranks
    lines = [f"  rank {rank}: {words}" for rank, words in zip(ranks, said, strict=True)]
    raise CollectiveMismatchError(
        f"rank {ranks[pg.rank()]}, group {pg.group_name!r}: ranks run different plans:\n"
        f"{chr(10).join(lines)}\nCall run_plan on every rank of the group, with the same source "
        f"and target and with tensors of one dtype. Nothing has moved.",
        ranks=[ranks[rank] for rank in at_fault],
    )


def _words(plan: Plan, dtype: torch.dtype) -> str:
    shape = f"{str(dtype).removeprefix('torch.')} {list(plan.source.shape)}"
    return f"{shape} from {_told(plan.source)} to {_told(plan.target)}"


def _told(tiling: Tiling) -> str:
    """A tiling's beginning, for a person."""
    tiles = [f"{tile.box} on {list(tile.owners)}" for tile in tiling.tiles[:_TILES_TOLD]]
    more = len(tiling.tiles) - len(tiles)
    terms = f"{tiling.reduce_op} of {len(tiling.terms)} terms: " if tiling.reduce_op else ""
    return f"{terms}{', '.join(tiles)}{f' and {more} more tiles' if more else ''}"
