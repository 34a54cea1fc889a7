"""Parts of tensors as contiguous rows: in place if contiguous, else in a buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from tilework.comm.transfer.round_shares import PieceRange, blocks
from tilework.layout import Piece

ViewOf = Callable[[Piece], Tensor]


class PackedRows:
    """A contiguous row of elements for each peer in each round, at one end of an exchange.

    A row is a view of a tensor where the elements are contiguous, else a part of a buffer.

    Args:
        view_of: Gives the view of a piece.
        empty: Makes the buffer, of a number of elements.
        most: The most elements that any round moves: the size of the buffer.
    """

    def __init__(self, view_of: ViewOf, empty: Callable[[int], Tensor], most: int) -> None:
        self._view_of = view_of
        self._empty = empty
        self._most = most
        self._nothing = self._buffer = empty(0)
        #: Views of tensors, each with a view of the buffer for the same elements in this round.
        self._buffered: list[tuple[Tensor, Tensor]] = []

    def rows(self, streams: Sequence[Sequence[PieceRange]]) -> list[Tensor]:
        """A row for each stream, which is the list of a peer's parts in this round.

        Rows in the buffer are valid until the next call.
        """
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
