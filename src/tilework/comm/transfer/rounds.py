"""Any plan, in rounds: a small buffer packs, moves and unpacks non-contiguous elements.

Each round moves a share of the pieces between any two ranks, and of the pieces that a rank keeps,
so that tensors are read once from one end to the other. The number of rounds is such that a rank's
shares stay within the buffer, which should fit a cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tilework.comm.contract import ProcessGroup
from tilework.comm.operations import collectives
from tilework.comm.transfer.local_transfer import LocalTransfer
from tilework.comm.transfer.packing import PackedRows, cached_views
from tilework.comm.transfer.reduce_rounds import ReducingTensors, rounds_to_reduce
from tilework.comm.transfer.round_shares import PieceRange, rounds_for, shares
from tilework.comm.transfer.run_mode import RunMode
from tilework.layout import Piece

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
    """Run the plan of ``local`` in rounds, in the mode that all ranks have agreed on.

    Collective, unless no data moves between ranks.
    """
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
