"""Rounds that reduce terms where they arrive, region by region, so that they fit a buffer.

A round brings one region of each target tile, all terms of it. They are reduced in the order of
terms, whatever ranks they come from: every rank that gets an element gets the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilework.comm.backends.threads.reference import combine
from tilework.comm.transfer.local_transfer import LocalTransfer
from tilework.comm.transfer.round_shares import Part, region_shares, regions, rounds_for
from tilework.layout import Box, Piece


def rounds_to_reduce(local: LocalTransfer, room: int) -> int:
    """The number of rounds that keeps this rank's regions, and what reducing them takes, in room.

    Args:
        local: The rank's pieces.
        room: Elements, for each direction.
    """
    source, target = local.plan.source, local.plan.target
    sent = {(piece.dst, piece.dst_tile, piece.term) for piece in local.plan.sends}
    # A term may be held by many ranks: then a whole region may come from one of them.
    going = sum(target.tiles[tile].box.volume for _, tile, _ in sent)
    coming = sum(box.volume for box in target.boxes_of(local.plan.rank)) * len(source.terms)
    streams = len(sent) + len(local.target.tensors)
    return rounds_for(max(going, coming * _weight(local.dtype)), room, streams)


def _weight(dtype: torch.dtype) -> int:
    """The elements held for each that arrives, until it is reduced.

    One in the buffer that it arrives in, one in its region, one or less for the result; and
    what it is converted to: 16-bit floats to two of their size.
    """
    if dtype in (torch.float16, torch.bfloat16):
        return 6
    return 3 if dtype.is_floating_point or dtype.is_complex else 4


class ReducingTensors:
    """The tensors between which pieces are moved, and reduced where they arrive.

    Args:
        local: The rank's pieces and tensors.
        rounds: The number of rounds.
    """

    def __init__(self, local: LocalTransfer, rounds: int) -> None:
        self._local = local
        self._rounds = rounds
        self.source_view = local.source_view
        self._regions: dict[int, list[list[Box]]] = {}
        #: By target tile, for each box of the round's region: it, and its terms.
        self._arriving: dict[int, list[tuple[Box, Tensor]]] = {}

    def shares(self, pieces: Sequence[Piece]) -> list[list[Part]]:
        """The parts of ``pieces`` that each round moves: those in its regions."""
        return region_shares(pieces, self._rounds, self._regions_of)

    def _regions_of(self, tile: int) -> list[list[Box]]:
        if tile not in self._regions:
            box = self._local.plan.target.tiles[tile].box
            self._regions[tile] = regions(box, self._rounds)
        return self._regions[tile]

    def begin(self, number: int) -> None:
        """Make room for a round's regions."""
        terms = len(self._local.plan.source.terms)
        self._arriving = {
            tile: [(b, self._local.empty(terms, *b.sizes)) for b in self._regions_of(tile)[number]]
            for tile in self._local.target.tensors
            if tile not in self._local.plan.fills
        }

    def target_view(self, piece: Piece) -> Tensor:
        """The view into which a piece goes that arrives."""
        for box, terms in self._arriving[piece.dst_tile]:
            if box.contains(piece.box):
                return terms[piece.term][piece.box.relative_to(box).slices]
        raise LookupError(f"{piece} belongs to no region of this round")

    def finish(self) -> None:
        """Reduce the round's regions into the target."""
        op = self._local.reduce_op.value
        for tile, boxes in self._arriving.items():
            for box, terms in boxes:
                total = combine(terms.unbind(0), op, ())
                self._local.target.view(tile, box).copy_(total)
