"""Before a plan runs, ranks compare what they are about to run: one small all_gather.

It tells every rank that all run the same plan on the same dtype, whether all have memory that one
collective can use as it is, and how many rounds the rank needs that needs most. If something is
wrong on one rank, all raise, nothing has moved, and the group goes on.
"""

from __future__ import annotations

import contextlib
import zlib
from array import array
from dataclasses import dataclass
from hashlib import blake2b

import torch

from tilework.comm import collectives, objects
from tilework.comm.contract import ProcessGroup
from tilework.errors import CollectiveMismatchError
from tilework.layout import Plan, Tiling

_REFUSED, _STRAIGHT, _SPREAD = 1, 2, 4
#: How many tiles a message names.
_TILES_TOLD = 4


@dataclass(frozen=True, slots=True)
class Terms:
    """How a plan is run; what one rank proposes, or what suits all."""

    rounds: int
    """As many as are needed to stay within the buffers."""
    straight: bool
    """Whether one collective does it, on tensors and outputs as they are."""
    spread: bool
    """Whether what a rank sends is the same for all ranks."""


def agree(
    pg: ProcessGroup, plan: Plan, dtype: torch.dtype, device: torch.device, terms: Terms
) -> Terms:
    """The terms that suit every rank. Collective.

    Raises:
        CollectiveMismatchError: On every rank: ranks run different plans, or one refuses.
    """
    state = _STRAIGHT * terms.straight + _SPREAD * terms.spread
    row = [_digest(plan.source), _digest(plan.target), zlib.crc32(str(dtype).encode())]
    words = f"{str(dtype).removeprefix('torch.')} {list(plan.source.shape)} from "
    words += f"{_told(plan.source)} to {_told(plan.target)}"
    rows = _exchange(pg, [*row, state, terms.rounds], words, device)
    return Terms(
        rounds=max(rounds for *_, rounds in rows),
        straight=all(state & _STRAIGHT for *_, state, _ in rows),
        spread=all(state & _SPREAD for *_, state, _ in rows),
    )


def refuse(pg: ProcessGroup, error: Exception, device: torch.device) -> None:
    """Have the others, who are about to agree, raise instead of waiting. Collective."""
    words = f"did not run its plan: {type(error).__name__}: {error}"
    with contextlib.suppress(CollectiveMismatchError):
        _exchange(pg, [0, 0, 0, _REFUSED, 0], words, device)


def _exchange(
    pg: ProcessGroup, row: list[int], words: str, device: torch.device
) -> list[list[int]]:
    """Every rank's row, if they are the same plan's."""
    mine = torch.tensor(row, dtype=torch.int64, device=device)
    all_of = torch.empty(pg.size() * len(row), dtype=torch.int64, device=device)
    collectives.all_gather_into_tensor(all_of, mine, pg)
    rows: list[list[int]] = all_of.view(pg.size(), -1).tolist()
    refused = [rank for rank, other in enumerate(rows) if other[3] == _REFUSED]
    odd = [rank for rank, other in enumerate(rows) if other[:3] != rows[0][:3]]
    if refused or odd:
        _raise_everywhere(pg, words, refused or [0, *odd])
    return rows


def _raise_everywhere(pg: ProcessGroup, words: str, at_fault: list[int]) -> None:
    said: list[str] = [""] * pg.size()
    objects.all_gather_object(said, words, pg, weights_only=True)
    lines = [f"  rank {rank}: {told}" for rank, told in zip(pg.global_ranks, said, strict=True)]
    raise CollectiveMismatchError(
        f"rank {pg.global_ranks[pg.rank()]}, group {pg.group_name!r}: ranks do not run the same "
        f"plan:\n{chr(10).join(lines)}\nCall run_plan on every rank of the group, with the same "
        f"source and target and with tensors of one dtype. Nothing has moved.",
        ranks=[pg.global_ranks[rank] for rank in at_fault],
    )


def _told(tiling: Tiling) -> str:
    """A tiling's beginning, for a person."""
    tiles = [f"{tile.box} on {list(tile.owners)}" for tile in tiling.tiles[:_TILES_TOLD]]
    more = len(tiling.tiles) - len(tiles)
    terms = f"{tiling.reduce_op} of {len(tiling.terms)} terms: " if tiling.reduce_op else ""
    return f"{terms}{', '.join(tiles)}{f' and {more} more tiles' if more else ''}"


def _digest(tiling: Tiling) -> int:
    """A number that tells tilings apart, the same in all processes."""
    numbers = array("q", [len(tiling.shape), *tiling.shape])
    for term in tiling.terms:
        numbers.append(len(term))
        for tile in term:
            numbers.extend(tile.box.offsets)
            numbers.extend(tile.box.sizes)
            numbers.append(len(tile.owners))
            numbers.extend(tile.owners)
    digest = blake2b(numbers, digest_size=8, person=(tiling.reduce_op or "").encode()[:16])
    return int.from_bytes(digest.digest(), "little") >> 1
