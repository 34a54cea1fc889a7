"""The rows of an epoch, and each rank's part of them: values, nothing that communicates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

#: The ranks' rows where their number does not divide evenly: repeat the first ones, leave out the
#: last ones, or let some ranks have a row more than others.
Uneven = Literal["pad", "drop", "keep"]


def epoch_order(length: int, shuffle: bool, seed: int, epoch: int) -> Tensor:
    """The order in which an epoch takes the ``length`` rows of a dataset; the same on every rank.

    Args:
        length: The number of rows.
        shuffle: True: each epoch has another order. False: all have the order of the dataset.
        seed: The seed of the order.
        epoch: The number of the epoch, which is added to the seed. The order is the same as that of
            torch's DistributedSampler.

    Example:
        >>> epoch_order(4, shuffle=False, seed=0, epoch=0).tolist()
        [0, 1, 2, 3]
    """
    if not shuffle:
        return torch.arange(length, device="cpu")
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(length, generator=generator, device="cpu")


@dataclass(frozen=True)
class Division:
    """A division of rows among ranks: rank r takes every ``ranks``-th row, beginning with row r.

    If each rank takes ``b`` rows at a time, the ranks together take the next ``b * ranks`` rows of
    the order. Their batches together are those of one process, whatever the number of ranks.

    Raises:
        ValueError: The rank is not from 0 to ``ranks - 1``, or ``uneven`` is not valid.
    """

    rank: int
    ranks: int
    uneven: Uneven = "pad"

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise ValueError(
                f"rank {self.rank} of {self.ranks}: a rank is at least 0, and less than the number "
                f"of ranks"
            )
        if self.uneven not in get_args(Uneven):
            expected = ", ".join(map(repr, get_args(Uneven)))
            raise ValueError(f"uneven must be one of {expected}, got {self.uneven!r}")

    def count(self, length: int) -> int:
        """The number of rows that this rank gets of ``length`` rows."""
        full, rest = divmod(length, self.ranks)
        if self.uneven == "pad":
            return full + (rest > 0)
        return full if self.uneven == "drop" else full + (self.rank < rest)

    def part(self, order: Tensor, start: int = 0) -> Tensor:
        """This rank's rows of ``order`` after the first ``start`` rows, which ranks have taken.

        Example:
            >>> order = epoch_order(5, shuffle=False, seed=0, epoch=0)
            >>> [Division(rank, 2).part(order).tolist() for rank in range(2)]
            [[0, 2, 4], [1, 3, 0]]
            >>> [Division(rank, 2, "keep").part(order).tolist() for rank in range(2)]
            [[0, 2, 4], [1, 3]]
        """
        left = order[start:]
        missing = -len(left) % self.ranks
        if self.uneven == "pad" and missing:
            repeats = -(-missing // len(order))
            left = torch.cat([left, order.repeat(repeats)[:missing]])
        elif self.uneven == "drop" and missing:
            left = left[: len(left) - len(left) % self.ranks]
        return left[self.rank :: self.ranks]
