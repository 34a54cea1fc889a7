"""The memory of one rank that a load fills: needed regions of parts, and their targets."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tilework.checkpoint.dtypes import DTYPES
from tilework.checkpoint.load_planning import Need, Wanted
from tilework.checkpoint.memory import Runs, runs_of
from tilework.checkpoint.saved import Part
from tilework.tiled import TiledTensor

#: The place of a box's elements: a tensor of the box's size, or runs in memory for the core.
Place = Tensor | Runs


class Targets:
    """The tensors that this rank fills.

    Runs are computed once for equal tensors, as models have the same layers many times.

    Args:
        wanted: The tensors to load, the same list on all ranks.
        tensors: For each wanted tensor, this rank's tensor to fill; None if this rank has none.
        rank: This rank.
        by_core: True if the core reads the files, and can write to memory itself.
    """

    def __init__(
        self, wanted: Sequence[Wanted], tensors: Sequence[Tensor | None], rank: int, by_core: bool
    ) -> None:
        self._wanted, self._tensors = wanted, tensors
        self._rank, self._by_core = rank, by_core
        self._tiles: dict[tuple[int, int], Tensor] = {}
        #: By id of a need, shared by equal tensors; the need is kept, so that no other gets the id.
        self._runs: dict[object, tuple[Runs | None, Need, Part]] = {}

    def view(self, number: int, need: Need) -> Tensor:
        """The view of this rank's tensor ``number`` that a need fills, of the size of the box."""
        tile, local = self._wanted[number].tiles[need.tile][0], self._tile(number, need.tile)
        return local if need.box is tile else local[need.box.relative_to(tile).slices]

    def place(self, number: int, part: Part, need: Need) -> Place:
        """The place for a need: runs for the core if possible, else the :meth:`view`."""
        saved, local = self._wanted[number].saved, self._tile(number, need.tile)
        if (
            not self._by_core
            or local.device.type != "cpu"
            or local.dtype is not DTYPES[saved.dtype]
        ):
            return self.view(number, need)
        address = local.data_ptr()
        key = id(need), local.stride(), local.dtype, local.is_conj(), local.is_neg()
        known = self._runs.get(key)
        if known is None or known[1] is not need or known[2].box != part.box:
            runs = runs_of(part.box, need.box, self.view(number, need))
            relative = runs and (runs[0] - address, *runs[1:])
            known = self._runs[key] = relative, need, part
        found = known[0]
        return self.view(number, need) if found is None else (found[0] + address, *found[1:])

    def _tile(self, number: int, tile: int) -> Tensor:
        """This rank's memory for a tile of the wanted tensor ``number``."""
        known = self._tiles.get((number, tile))
        if known is None:
            tensor = self._tensors[number]
            assert tensor is not None
            if isinstance(tensor, TiledTensor):
                boxes = tensor.tiling.boxes_of(self._rank)
                tensor = tensor.local_tiles()[boxes.index(self._wanted[number].tiles[tile][0])]
            known = self._tiles[number, tile] = tensor.detach()
        return known
