"""An exchange after which each rank has a box of a tensor; boxes of neighbours may overlap.

Windows need elements of neighbours beside the rank's own: a halo. The pieces that move are those of
:func:`~tilework.layout.plan`, and go by one all_to_all between the ranks along the axes that shard
the dims. In backward the same pieces go back, and are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tilework.comm import provenance_digest
from tilework.dtensor.debug import causes
from tilework.dtensor.local_function import LocalFunction
from tilework.dtensor.provenance.digests import Moved, TensorText, moving
from tilework.dtensor.redistribution.collective_steps import tiling_along
from tilework.dtensor.redistribution.redistribute import gradient_of
from tilework.dtensor.spec import DTensorSpec
from tilework.layout import Box, Piece, Tiling, plan, plan_all_ranks
from tilework.layout.internal import trusted_tile, trusted_tiling

#: The range of a dim (offset and size) that the rank at a mesh coordinate needs.
RangeAt = Callable[[Sequence[int]], tuple[int, int]]
#: For each peer of the group, the places of the pieces in the local tensor, as slices.
_Places = list[list[tuple[slice, ...]]]


class BoxExchange:
    """An exchange from a layout, not partial, to one box on each rank, ready to run.

    Collective over the axes that shard the dims if the group is not made yet. ``needs`` has the
    ranges of dims of which ranks need other ranges than they have.
    """

    def __init__(self, spec: DTensorSpec, needs: Mapping[int, RangeAt]) -> None:
        mesh, self.spec = spec.mesh, spec
        self._axes = tuple(sorted({axis for dim in needs for axis in spec.axes_of(dim)}))
        self._group, me = mesh.axes_group(self._axes), mesh.get_rank()
        self._source = tiling_along(spec, self._axes)
        shape = self._source.shape
        tiles = []
        for rank in self._group.global_ranks:
            coordinate = mesh.spec.coordinate(rank) or ()
            spans = [
                needs[dim](coordinate) if dim in needs else (0, size)
                for dim, size in enumerate(shape)
            ]
            offsets, sizes = zip(*spans, strict=True)
            tiles.append(trusted_tile(Box(offsets, sizes), (rank,)))
        self._target: Tiling = trusted_tiling(shape, (tuple(tiles),))
        own = plan(self._source, self._target, me)
        (had,), (gets,) = self._source.boxes_of(me), self._target.boxes_of(me)
        self._shapes = had.sizes, gets.sizes
        #: The shape of this rank's box.
        self.box_sizes = gets.sizes
        self._moves = own.collective.kind != "none"
        self._sent = self._places([(piece, piece.dst) for piece in own.sends], had)
        self._received = self._places([(piece, piece.src) for piece in own.receives], gets)
        self._kept = [
            (piece.box.relative_to(had).slices, piece.box.relative_to(gets).slices)
            for piece in own.keeps
        ]

    def _places(self, pieces: Sequence[tuple[Piece, int]], base: Box) -> _Places:
        return [
            [piece.box.relative_to(base).slices for piece, of in pieces if of == peer]
            for peer in self._group.global_ranks
        ]

    @cached_property
    def digest(self) -> int:
        """A hash that is the same on all ranks."""
        return hash((self._source.digest, self._target.digest))

    @cached_property
    def most_elements(self) -> int:
        """The most elements that a rank sends or receives."""
        plans = plan_all_ranks(self._source, self._target).plans
        return max(max(each.bytes_sent(1), each.bytes_received(1)) for each in plans)

    def __call__(self, local: Tensor, operator: str) -> Tensor:
        """This rank's box of the tensor. Collective if something moves; differentiable."""
        of = Moved(provenance_digest.digest(), operator)
        box: Tensor = _Exchange.apply(local, self, False, of)
        return box

    def run(self, x: Tensor, back: bool, of: Moved) -> Tensor:
        """The box; or with ``back``, the sums of boxes' elements in the places they came from."""
        sent, received = (self._received, self._sent) if back else (self._sent, self._received)
        out = x.new_zeros(self._shapes[0 if back else 1])
        for before, after in self._kept:
            if back:
                out[before] += x[after]
            else:
                out[after] = x[before]
        if not self._moves:
            return out
        inputs = [_flat([x[place] for place in places], x) for places in sent]
        outputs = [
            x.new_empty(sum([out[place].numel() for place in places])) for places in received
        ]
        names = self.spec.mesh.mesh_dim_names or tuple(map(str, range(self.spec.mesh.ndim)))
        if causes.watchers:
            axes = tuple([names[axis] for axis in self._axes])
            nbytes = self.most_elements * x.dtype.itemsize
            causes.record_exchange(self.spec, axes, x.dtype, nbytes)
        with moving(hash((of.digest, self.digest)), of.operator, TensorText(self.spec, x.dtype)):
            self._group.collective("all_to_all", inputs, outputs, async_op=False)
        for places, flat in zip(received, outputs, strict=True):
            at = 0
            for place in places:
                region = out[place]
                region += flat[at : at + region.numel()].view(region.shape)
                at += region.numel()
        return out


def _flat(regions: Sequence[Tensor], like: Tensor) -> Tensor:
    if not regions:
        return like.new_empty(0)
    return torch.cat([region.reshape(-1) for region in regions])


class _Exchange(LocalFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: BoxExchange, back: bool, of: Moved) -> Tensor:
        ctx.exchange, ctx.back, ctx.of = exchange, back, of
        return exchange.run(x.detach(), back, of)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        of = gradient_of(ctx.of, ctx.exchange.spec, grad)
        moved: Tensor = _Exchange.apply(grad, ctx.exchange, not ctx.back, of)
        return moved, None, None, None
