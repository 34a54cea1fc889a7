"""This rank's side of a plan while it runs: the group, the pieces by peer, the tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup
from tilework.comm.reduce_op import RedOpType
from tilework.layout import Box, Piece, Plan, Tiling

#: The dtypes for moving elements without a reduction: every dtype can be moved as an integer, as
#: fast as the size allows.
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
MOVED = frozenset(_INTEGER_OF_SIZE.values())


class LocalTiles:
    """A rank's tensors for each tile of ``tiling.of(rank)``, viewed as a dtype of equal size."""

    def __init__(
        self, tiling: Tiling, rank: int, tensors: Sequence[Tensor], dtype: torch.dtype
    ) -> None:
        views = [tensor.detach().view(dtype) for tensor in tensors]
        self.tensors = dict(zip(tiling.of(rank), views, strict=True))
        self._tiles = tiling.tiles

    def view(self, tile: int, box: Box) -> Tensor:
        """The view of a tile's tensor that holds ``box`` (in the full tensor's coordinates)."""
        return self.tensors[tile][box.relative_to(self._tiles[tile].box).slices]


@dataclass
class LocalTransfer:
    """This rank's side of a plan: the pieces to send, receive and keep, and the memory."""

    #: The group whose ranks run the plan.
    pg: ProcessGroup
    plan: Plan
    #: The tensors that this rank reads.
    source: LocalTiles
    #: The tensors that this rank writes.
    target: LocalTiles
    #: The dtype of the tensors; ``source`` and ``target`` may show them as integers.
    dtype: torch.dtype
    #: The device of the tensors, and of buffers for elements in flight.
    device: torch.device
    #: The element that fills tiles that get no value.
    identity: bool | int | float
    #: By group rank: the pieces to send; for this rank, the pieces that it keeps.
    sends: list[list[Piece]] = field(init=False)
    #: By group rank: the pieces to receive; for this rank, the pieces that it keeps.
    receives: list[list[Piece]] = field(init=False)

    def __post_init__(self) -> None:
        me = self.pg.rank()
        self.sends = self._by_peer((self.pg.group_ranks[p.dst], p) for p in self.plan.sends)
        self.receives = self._by_peer((self.pg.group_ranks[p.src], p) for p in self.plan.receives)
        self.sends[me] = self.receives[me] = list(self.plan.keeps)

    def _by_peer(self, pieces: Iterable[tuple[int, Piece]]) -> list[list[Piece]]:
        by_peer: list[list[Piece]] = [[] for _ in range(self.pg.size())]
        for peer, piece in pieces:
            by_peer[peer].append(piece)
        return by_peer

    @cached_property
    def nothing(self) -> Tensor:
        """A tensor without elements, for peers that nothing is sent to or received from."""
        return self.empty(0)

    @property
    def memory_dtype(self) -> torch.dtype:
        """The dtype to view elements as: the tensors' for a reduction, else integers."""
        return self.dtype if self.plan.reduces else moved_dtype(self.dtype)

    @property
    def reduce_op(self) -> RedOpType:
        """The reduction of the source's terms."""
        return RedOpType(self.plan.source.reduce_op)

    def empty(self, *sizes: int) -> Tensor:
        """An uninitialised tensor for elements in flight, of ``memory_dtype``."""
        return torch.empty(sizes, dtype=self.memory_dtype, device=self.device)

    def source_view(self, piece: Piece) -> Tensor:
        """The view of this rank's source tensor that holds a piece to send or keep."""
        return self.source.view(piece.src_tile, piece.box)

    def target_view(self, piece: Piece) -> Tensor:
        """The view of this rank's target tensor to write a received or kept piece into."""
        return self.target.view(piece.dst_tile, piece.box)

    def keep(self) -> None:
        """Copy the pieces that this rank keeps, from the source tensors to the target tensors."""
        for piece in self.plan.keeps:
            self.target_view(piece).copy_(self.source_view(piece))


def moved_dtype(dtype: torch.dtype) -> torch.dtype:
    """The integer dtype as wide as ``dtype``; ``dtype`` itself if there is none."""
    return _INTEGER_OF_SIZE.get(dtype.itemsize, dtype)


def in_rows(view: Tensor) -> bool:
    """True if a view's elements lie in contiguous rows of equal length, a constant stride apart."""
    run, row = 1, 0
    for size, stride in zip(reversed(view.shape), reversed(view.stride()), strict=True):
        if size == 1:
            continue
        if row == 0 and stride == run:
            run *= size
        elif row == 0 and stride > run:
            row = stride * size
        elif row == stride != 0:
            row *= size
        else:
            return False
    return True


def flat(view: Tensor) -> Tensor | None:
    """A view's elements in one dim, without copying; None if they are not contiguous."""
    return view.view(-1) if view.is_contiguous() else None
