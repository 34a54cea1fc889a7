"""Parts of tensors as memory in a row: where they lie, if that is one, else in a buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from tilework.comm.transfer.cuts import Part
from tilework.layout import Piece

ViewOf = Callable[[Piece], Tensor]


class Rows:
    """Rows for the parts of one round after the other, at one end of an exchange.

    Args:
        view_of: Where a piece lies.
        empty: Makes the buffer.
    """

    def __init__(self, view_of: ViewOf, empty: Callable[[int], Tensor]) -> None:
        self._view_of = view_of
        self._empty = empty
        self._buffer = empty(0)
        #: Views of tensors, and where in the buffer their elements are in this round.
        self._buffered: list[tuple[Tensor, Tensor]] = []

    def rows(self, streams: Sequence[Sequence[Part]]) -> list[Tensor]:
        """One row for each stream's parts. Those in the buffer are good until the next round."""
        self._buffered = []
        viewed = [[view for part in parts for view in self.views(part)] for parts in streams]
        loose = [views for views in viewed if not _in_a_row(views)]
        self._reserve(sum(view.numel() for views in loose for view in views))
        found, used = [], 0
        for views in viewed:
            if _in_a_row(views):
                found.append(views[0].view(-1))
                continue
            start = used
            for view in views:
                room = self._buffer[used : used + view.numel()]
                self._buffered.append((view, room.view(view.shape)))
                used += view.numel()
            found.append(self._buffer[start:used])
        return found

    def views(self, part: Part) -> list[Tensor]:
        """Where the part's elements lie."""
        piece = self._view_of(part.piece)
        if part.volume == piece.numel():
            return [piece]
        if piece.is_contiguous():
            return [piece.view(-1)[part.start : part.stop]]
        return [self._view_of(part.piece._replace(box=box)) for box in part.boxes()]

    def pack(self) -> None:
        """Copy what is in tensors to the buffer."""
        for view, room in self._buffered:
            room.copy_(view)

    def unpack(self) -> None:
        """Copy what is in the buffer to tensors."""
        for view, room in self._buffered:
            view.copy_(room)

    def _reserve(self, elements: int) -> None:
        if self._buffer.numel() < elements:
            self._buffer = self._empty(0)  # given back first
            self._buffer = self._empty(elements)


def _in_a_row(views: Sequence[Tensor]) -> bool:
    return len(views) == 1 and views[0].is_contiguous()
