"""Look-ups by global index in the local range of a dim."""

from __future__ import annotations

from torch import Tensor

from tilework.tiled.factors import Factor
from tilework.tiled.op_rules import LocalRanges


class LocalIndexRange:
    """The local range of a factor, for look-ups by global index.

    Args:
        ranges: The local ranges of all factors.
        factor: The factor.
        checked: False if nothing is looked up, so that torch lets all indices pass.
    """

    def __init__(self, ranges: LocalRanges, factor: Factor, checked: bool = True) -> None:
        self.checked = checked or not factor.size
        self.start, self.count = ranges.local_range(factor)
        self.total = factor.size
        self.is_full = not ranges.is_sharded(factor)

    def local_index(self, index: int | None) -> int | None:
        """The local index of a global index; None if it is not local."""
        here = index is not None and self.start <= index < self.start + self.count
        return index - self.start if here and index is not None else None

    def localize(self, indices: Tensor, ignored: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Local indices (0 for those that are not local), and the mask of local indices.

        Args:
            indices: Global indices.
            ignored: The mask of indices to ignore.

        Raises:
            IndexError: An index is out of the global range.
        """
        outside = (indices < 0) | (indices >= self.total)
        if ignored is not None:
            outside &= ~ignored
        if self.checked and outside.any():
            raise IndexError(
                f"index out of range: {int(indices[outside][0])} is not in [0, {self.total})"
            )
        places = indices - self.start
        here = (places >= 0) & (places < self.count)
        if ignored is not None:
            here &= ~ignored
        return places.where(here, 0), here
