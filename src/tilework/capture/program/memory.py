"""Inputs of a program that share memory: a condition of programs that rely on it."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence

from torch import Tensor


def nbytes_spanned(tensor: Tensor) -> int:
    """The bytes from a tensor's first element to the end of the last; 0 without elements."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((size - 1) * stride for size, stride in steps) + 1) * tensor.itemsize


class SharedMemory:
    """The inputs that overlap in memory; those at ``moving`` are other tensors in each call."""

    def __init__(self, inputs: Sequence[Tensor], moving: Sequence[int]) -> None:
        self._spans = [nbytes_spanned(each) for each in inputs]
        self._longest = max(self._spans, default=0)
        self._moving = list(moving)
        self._still = sorted(set(range(len(inputs))) - set(moving))
        self._addresses: list[int] = []
        #: Begin, end and position of each still input; and the pairs of them that overlap.
        self._sorted: list[tuple[int, int, int]] = []
        self._overlaps: set[tuple[int, int]] = set()
        #: The pairs of positions of inputs that overlap.
        self.pairs = self._pairs(inputs)

    def holds(self, inputs: Sequence[Tensor]) -> bool:
        """True if the same inputs overlap as in the recorded call."""
        return self._pairs(inputs) == self.pairs

    def _pairs(self, inputs: Sequence[Tensor]) -> set[tuple[int, int]]:
        addresses = [inputs[i].data_ptr() for i in self._still]
        if addresses != self._addresses:
            self._addresses, self._sorted, self._overlaps = addresses, [], set()
            for i, begin in zip(self._still, addresses, strict=True):
                self._overlaps |= self._put(i, begin, self._sorted)
        found, known = set(self._overlaps), self._sorted
        for i in self._moving:
            if known is self._sorted:
                known = list(known)
            found |= self._put(i, inputs[i].data_ptr(), known)
        return found

    def _put(
        self, position: int, begin: int, known: list[tuple[int, int, int]]
    ) -> set[tuple[int, int]]:
        """Add an input to the sorted list, and return the pairs with those that it overlaps."""
        end = begin + self._spans[position]
        if not begin or begin == end:  # no memory, or freed memory
            return set()
        last = bisect_right(known, (end, 0, 0))
        first = bisect_right(known, (begin - self._longest, 0, 0))
        met = {other for _, stop, other in known[first:last] if stop > begin}
        insort(known, (begin, end, position))
        return {(min(position, other), max(position, other)) for other in met}
