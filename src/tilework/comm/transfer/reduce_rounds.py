"""Rounds that reduce arriving terms, region by region, within a buffer.

A round brings one region of each target tile, with all terms of it. The terms are reduced in order,
from whichever ranks they come: every rank that gets an element gets the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilework.comm.backends.threads.reference import combine
from tilework.comm.transfer.local_transfer import LocalTransfer
from tilework.comm.transfer.round_shares import PieceRange, region_shares, regions, rounds_for
from tilework.layout import Box, Piece


def rounds_to_reduce(local: LocalTransfer, room: int) -> int:
    """The number of rounds that keeps this rank's data in flight within the buffers.

    In each round the rank sends terms of some regions, receives all terms of other regions, and
    reduces these. The buffer for sending holds the terms to send. The buffer for receiving holds
    the received terms, and the copies made to reduce them.

    Args:
        local: This rank's part of the plan, with the tensors.
        room: The size of the buffer for each direction, in elements.

    Returns:
        The number for this rank. All ranks have to use the largest number of any rank.
    """
    source, target = local.plan.source, local.plan.target
    sent = {(piece.dst, piece.dst_tile, piece.term) for piece in local.plan.sends}
    # Many ranks may hold a term: then a whole region may come from one rank.
    going = sum(target.tiles[tile].box.volume for _, tile, _ in sent)
    coming = sum(box.volume for box in target.boxes_of(local.plan.rank)) * len(source.terms)
    streams = len(sent) + len(local.target.tensors)
    return rounds_for(max(going, coming * _weight(local.dtype)), room, streams)


def _weight(dtype: torch.dtype) -> int:
    """Elements held per arriving element until it is reduced: 3, and 2 more to convert."""
    if dtype in (torch.float16, torch.bfloat16):
        return 6
    return 3 if dtype.is_floating_point or dtype.is_complex else 4


class ReducingTensors:
    """The source and target tensors of a plan in rounds, for a plan that reduces.

    The terms that arrive in a round are reduced into the target at the end of the round.

    Args:
        local: The rank's pieces and tensors.
        rounds: The number of rounds.
    """

    def __init__(self, local: LocalTransfer, rounds: int) -> None:
        self._local = local
        self._rounds = rounds
        self.source_view = local.source_view
        self._regions: dict[int, list[list[Box]]] = {}
        #: By target tile: each box of the round's region, with the terms of the box.
        self._arriving: dict[int, list[tuple[Box, Tensor]]] = {}

    def shares(self, pieces: Sequence[Piece]) -> list[list[PieceRange]]:
        """The parts of ``pieces`` that each round moves: the parts in the round's regions."""
        return region_shares(pieces, self._rounds, self._regions_of)

    def _regions_of(self, tile: int) -> list[list[Box]]:
        if tile not in self._regions:
            box = self._local.plan.target.tiles[tile].box
            self._regions[tile] = regions(box, self._rounds)
        return self._regions[tile]

    def begin(self, number: int) -> None:
        """Make memory for all terms of the regions that round ``number`` brings."""
        terms = len(self._local.plan.source.terms)
        self._arriving = {
            tile: [(b, self._local.empty(terms, *b.sizes)) for b in self._regions_of(tile)[number]]
            for tile in self._local.target.tensors
            if tile not in self._local.plan.fills
        }

    def target_view(self, piece: Piece) -> Tensor:
        """The view of the round's memory to write an arriving piece into."""
        for box, terms in self._arriving[piece.dst_tile]:
            if box.contains(piece.box):
                return terms[piece.term][piece.box.relative_to(box).slices]
        raise LookupError(f"{piece} belongs to no region of this round")

    def finish(self) -> None:
        """Reduce the terms of the round's regions, and write the results to the target tensors."""
        op = self._local.reduce_op.value
        for tile, boxes in self._arriving.items():
            for box, terms in boxes:
                total = combine(terms.unbind(0), op, ())
                self._local.target.view(tile, box).copy_(total)
