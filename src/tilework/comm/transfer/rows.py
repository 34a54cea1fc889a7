"""Parts of tensors as memory in a row: where they lie, if that is one, else in a buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from tilework.comm.transfer.cuts import Part, blocks
from tilework.layout import Piece

ViewOf = Callable[[Piece], Tensor]


class Rows:
    """Rows for the parts of one round after the other, at one end of an exchange.

    Args:
        view_of: Where a piece lies.
        empty: Makes the buffer.
        most: How many elements the parts of any round have together.
    """

    def __init__(self, view_of: ViewOf, empty: Callable[[int], Tensor], most: int) -> None:
        self._view_of = view_of
        self._empty = empty
        self._most = most
        self._nothing = self._buffer = empty(0)
        #: Views of tensors, and where in the buffer their elements are in this round.
        self._buffered: list[tuple[Tensor, Tensor]] = []

    def rows(self, streams: Sequence[Sequence[Part]]) -> list[Tensor]:
        """One row for each stream's parts. Those in the buffer are good until the next round."""
        viewed = [[view for part in parts for view in self.views(part)] for parts in streams]
        found = [self._lying(views) for views in viewed]
        loose = [peer for peer, row in enumerate(found) if row is None]
        volumes = {peer: sum(part.volume for part in streams[peer]) for peer in loose}
        if loose and not len(self._buffer):
            self._buffer = self._empty(self._most)
        self._buffered = []
        used = 0
        for peer, volume in volumes.items():
            found[peer] = self._buffer[used : used + volume]
            for view in viewed[peer]:
                room = self._buffer[used : used + view.numel()]
                self._buffered.append((view, room.view(view.shape)))
                used += room.numel()
        return found  # type: ignore[return-value]  # there is none left

    def _lying(self, views: Sequence[Tensor]) -> Tensor | None:
        """The row that the views are already; None if they are not."""
        if not views:
            return self._nothing
        return views[0].view(-1) if len(views) == 1 and views[0].is_contiguous() else None

    def views(self, part: Part) -> list[Tensor]:
        """Where the part's elements lie, as few views as they are."""
        whole = self._view_of(part.piece)
        if part.volume == whole.numel():
            return [whole]
        if whole.is_contiguous():
            return [whole.view(-1)[part.start : part.stop]]
        return self.blocks(part)

    def blocks(self, part: Part) -> list[Tensor]:
        """Where the part's elements lie, in views whose shapes are the same at both ends."""
        whole = self._view_of(part.piece)
        return [whole[block] for block in blocks(whole.shape, part.start, part.stop)]

    def pack(self) -> None:
        """Copy what is in tensors to the buffer."""
        for view, room in self._buffered:
            room.copy_(view)

    def unpack(self) -> None:
        """Copy what is in the buffer to tensors."""
        for view, room in self._buffered:
            view.copy_(room)


def remembered(view_of: ViewOf) -> ViewOf:
    """``view_of``, asked once for each piece: for pieces that are cut into several parts."""
    known: dict[int, Tensor] = {}

    def view(piece: Piece) -> Tensor:
        # By identity: hashing a piece costs more than a view.
        found = known.get(id(piece))
        if found is None:
            known[id(piece)] = found = view_of(piece)
        return found

    return view
