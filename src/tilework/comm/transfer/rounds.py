"""Any plan, in rounds: a small buffer packs, moves and unpacks non-contiguous elements.

Each round moves a share of the pieces between any two ranks, and of the pieces that a rank keeps,
so that tensors are read once from one end to the other. The number of rounds is such that a rank's
shares stay within the buffer, which should fit a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tilework.comm.backends.threads.reference import combine
from tilework.comm.contract import ProcessGroup
from tilework.comm.operations import collectives
from tilework.comm.transfer.local_transfer import LocalTransfer
from tilework.comm.transfer.round_shares import (
    PieceRange,
    blocks,
    region_shares,
    regions,
    rounds_for,
    shares,
)
from tilework.comm.transfer.run_mode import RunMode
from tilework.layout import Box, Piece

# A round brings one region of each target tile, with all terms of it. The terms are reduced in
# order, from whichever ranks they come: every rank that gets an element gets the same bits.


def rounds_to_reduce(local: LocalTransfer, room: int) -> int:
    """The number of rounds that keeps this rank's data in flight in ``room`` elements each way.

    All ranks use the largest number. In a round a rank sends terms of some regions, receives all
    terms of others, and reduces these, with the copies that this takes.
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
    """The tensors of a plan that reduces: a round's terms are reduced at the end of it."""

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


ViewOf = Callable[[Piece], Tensor]


class PackedRows:
    """A contiguous row of elements for each peer in each round, at one end of an exchange.

    A row is a view of a tensor where the elements are contiguous, else a part of a buffer of
    ``most`` elements, the most that any round moves.
    """

    def __init__(self, view_of: ViewOf, empty: Callable[[int], Tensor], most: int) -> None:
        self._view_of = view_of
        self._empty = empty
        self._most = most
        self._nothing = self._buffer = empty(0)
        #: Views of tensors, each with a view of the buffer for the same elements in this round.
        self._buffered: list[tuple[Tensor, Tensor]] = []

    def rows(self, streams: Sequence[Sequence[PieceRange]]) -> list[Tensor]:
        """A row for each peer's parts in this round, valid until the next call."""
        viewed = [[view for part in parts for view in self.views(part)] for parts in streams]
        rows = [self._in_place(views) for views in viewed]
        scattered = [peer for peer, row in enumerate(rows) if row is None]
        volumes = {peer: sum(part.volume for part in streams[peer]) for peer in scattered}
        if scattered and not len(self._buffer):
            self._buffer = self._empty(self._most)
        self._buffered = []
        used = 0
        for peer, volume in volumes.items():
            rows[peer] = self._buffer[used : used + volume]
            for view in viewed[peer]:
                room = self._buffer[used : used + view.numel()]
                self._buffered.append((view, room.view(view.shape)))
                used += room.numel()
        return rows  # type: ignore[return-value]  # there is no None left

    def _in_place(self, views: Sequence[Tensor]) -> Tensor | None:
        """The views as one row in place; None if they are not contiguous."""
        if not views:
            return self._nothing
        return views[0].view(-1) if len(views) == 1 and views[0].is_contiguous() else None

    def views(self, part: PieceRange) -> list[Tensor]:
        """Views of tensors that hold the part's elements together, as few as possible."""
        piece = self._view_of(part.piece)
        if part.volume == piece.numel():
            return [piece]
        if piece.is_contiguous():
            return [piece.view(-1)[part.start : part.stop]]
        return self.blocks(part)

    def blocks(self, part: PieceRange) -> list[Tensor]:
        """Views that hold the part's elements together, of the same shapes at both ends."""
        piece = self._view_of(part.piece)
        return [piece[block] for block in blocks(piece.shape, part.start, part.stop)]

    def pack(self) -> None:
        """Copy from tensors to the buffer."""
        for view, room in self._buffered:
            room.copy_(view)

    def unpack(self) -> None:
        """Copy from the buffer to tensors."""
        for view, room in self._buffered:
            view.copy_(room)


def cached_views(view_of: ViewOf) -> ViewOf:
    """A cached ``view_of``, for pieces that are split into several parts."""
    views: dict[int, Tensor] = {}

    def view(piece: Piece) -> Tensor:
        # By identity: hashing a piece costs more than a view.
        cached = views.get(id(piece))
        if cached is None:
            views[id(piece)] = cached = view_of(piece)
        return cached

    return view


#: The parts of each stream between two ranks, in one round.
Streams = Sequence[Sequence[PieceRange]]


def rounds_needed(local: LocalTransfer, buffer_bytes: int) -> int:
    """The number of rounds that keeps this rank's data in flight within ``buffer_bytes``."""
    room = buffer_bytes // 2 // local.dtype.itemsize  # one half for each direction
    if local.plan.reduces:
        return rounds_to_reduce(local, room)
    sent, received = (
        sum(piece.box.volume for piece in pieces)
        for pieces in (local.plan.sends, local.plan.receives)
    )
    return rounds_for(max(sent, received), room, local.pg.size())


def run_in_rounds(local: LocalTransfer, mode: RunMode) -> None:
    """Run the plan of ``local`` in rounds, in the agreed mode. Collective unless nothing moves."""
    kind = ReducingTensors if local.plan.reduces else _MovingTensors
    tensors = kind(local, mode.rounds)
    me = local.pg.rank()
    keeps = tensors.shares(local.plan.keeps)
    going = [local.sends[me - 1]] if mode.same_for_all else _of_others(local.sends, me)
    sends, receives = _by_round(going, tensors), _by_round(_of_others(local.receives, me), tensors)
    sources = PackedRows(tensors.source_view, local.empty, _most(sends))
    targets = PackedRows(tensors.target_view, local.empty, _most(receives))
    exchange = _all_gather if mode.same_for_all else _all_to_all
    for number in range(mode.rounds):
        tensors.begin(number)
        for part in keeps[number]:
            for target, source in zip(targets.blocks(part), sources.blocks(part), strict=True):
                target.copy_(source)
        if local.plan.collective.kind != "none":
            outgoing, incoming = sources.rows(sends[number]), targets.rows(receives[number])
            sources.pack()
            exchange(local.pg, outgoing, incoming)
            targets.unpack()
        tensors.finish()


def _of_others(streams: Sequence[Sequence[Piece]], me: int) -> list[Sequence[Piece]]:
    """The streams by group rank, with an empty stream for this rank ``me``."""
    return [() if peer == me else pieces for peer, pieces in enumerate(streams)]


def _by_round(
    streams: Sequence[Sequence[Piece]], tensors: _MovingTensors | ReducingTensors
) -> list[Streams]:
    """For each round, the parts of each stream that the round moves."""
    return list(zip(*[tensors.shares(pieces) for pieces in streams], strict=True))


def _most(rounds: Sequence[Streams]) -> int:
    """The largest number of elements that a round moves."""
    return max(sum(part.volume for parts in streams for part in parts) for streams in rounds)


def _all_to_all(pg: ProcessGroup, outgoing: list[Tensor], incoming: list[Tensor]) -> None:
    """Send ``outgoing[r]`` to each rank r, and receive ``incoming[r]`` from rank r. Collective."""
    collectives.all_to_all(incoming, outgoing, pg)


def _all_gather(pg: ProcessGroup, outgoing: list[Tensor], incoming: list[Tensor]) -> None:
    """Send ``outgoing`` to all ranks; receive ``incoming[r]`` from rank r. Collective."""
    (mine,) = outgoing
    incoming[pg.rank()] = mine
    collectives.all_gather(incoming, mine, pg)


class _MovingTensors:
    """The source and target tensors of a plan in rounds, for a plan that does not reduce."""

    def __init__(self, local: LocalTransfer, rounds: int) -> None:
        self._rounds = rounds
        self.source_view = cached_views(local.source_view)
        self.target_view = cached_views(local.target_view)

    def shares(self, pieces: Sequence[Piece]) -> list[list[PieceRange]]:
        return shares(pieces, self._rounds)

    def begin(self, number: int) -> None:
        pass

    def finish(self) -> None:
        pass
