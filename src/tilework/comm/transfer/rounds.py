"""Any plan, in rounds: what is not in a row is packed into a small buffer, moved and unpacked.

Each round moves a share of what any two ranks exchange, and of what a rank keeps, so that tensors
are read once from one end to the other. Rounds are sized so that a rank's shares stay within the
buffer. That fits a cache: packing and unpacking cost little besides the one read and the one write
that memory sees.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilework.comm import collectives
from tilework.comm.transfer.agreement import Terms
from tilework.comm.transfer.cuts import Part, rounds_for, shares
from tilework.comm.transfer.local import Local
from tilework.comm.transfer.reducing import Reduced, rounds_to_reduce
from tilework.comm.transfer.rows import Rows, ViewOf
from tilework.layout import Piece


def rounds_needed(local: Local, buffer_bytes: int) -> int:
    """How many rounds keep what this rank holds under way within ``buffer_bytes``."""
    room = buffer_bytes // 2 // local.dtype.itemsize  # one half for each direction
    if local.plan.reduces:
        return rounds_to_reduce(local, room)
    sent, received = (
        sum(piece.box.volume for piece in pieces)
        for pieces in (local.plan.sends, local.plan.receives)
    )
    return rounds_for(max(sent, received), room, local.pg.size())


def run_in_rounds(local: Local, terms: Terms) -> None:
    """Run the plan on the terms that all ranks have agreed on.

    Collective, unless no rank needs another.
    """
    target = Reduced(local, terms.rounds) if local.plan.reduces else _Moved(local, terms.rounds)
    sends = [target.shares(pieces) for pieces in local.sends]
    receives = [target.shares(pieces) for pieces in local.receives]
    exchange = _Exchange(local, target.view)
    for number in range(terms.rounds):
        target.begin(number)
        going, coming = ([stream[number] for stream in of] for of in (sends, receives))
        exchange.keep(going)
        if local.plan.collective.kind != "none":
            (exchange.spread if terms.spread else exchange.swap)(going, coming)
        target.finish()


class _Moved:
    """The target's tensors, as what arrives in rounds sees them."""

    def __init__(self, local: Local, rounds: int) -> None:
        self._rounds = rounds
        self.view = local.target_view

    def shares(self, pieces: Sequence[Piece]) -> list[list[Part]]:
        return shares(pieces, self._rounds)

    def begin(self, number: int) -> None:
        pass

    def finish(self) -> None:
        pass


class _Exchange:
    """What happens between ranks in a round.

    Args:
        local: The rank's pieces and tensors.
        target_view: Where a piece that arrives belongs.
    """

    def __init__(self, local: Local, target_view: ViewOf) -> None:
        self._pg = local.pg
        self._me = local.pg.rank()
        self._nothing = local.nothing
        self._from = Rows(local.source_view, local.empty)
        self._to = Rows(target_view, local.empty)

    def keep(self, going: Sequence[Sequence[Part]]) -> None:
        """Copy what this rank sends to itself."""
        for part in going[self._me]:
            for view, source in zip(self._to.views(part), self._from.views(part), strict=True):
                view.copy_(source)

    def swap(self, going: Sequence[Sequence[Part]], coming: Sequence[Sequence[Part]]) -> None:
        """Each rank sends each other its own parts. Collective."""
        inputs, outputs = self._from.rows(self._others(going)), self._to.rows(self._others(coming))
        self._from.pack()
        collectives.all_to_all(outputs, inputs, self._pg)
        self._to.unpack()

    def spread(self, going: Sequence[Sequence[Part]], coming: Sequence[Sequence[Part]]) -> None:
        """Each rank sends all others the same parts. Collective."""
        (mine,) = self._from.rows(going[:1])
        outputs = self._to.rows(self._others(coming))
        outputs[self._me] = mine
        self._from.pack()
        collectives.all_gather(outputs, mine, self._pg)
        self._to.unpack()

    def _others(self, streams: Sequence[Sequence[Part]]) -> list[Sequence[Part]]:
        return [() if peer == self._me else parts for peer, parts in enumerate(streams)]
