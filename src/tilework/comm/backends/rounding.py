"""float32 numbers in few bytes, for slow links: as bfloat16, or as 8-bit integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

#: 8-bit integers have a least value and a scale, in float32, for so many elements.
ROW: Final = 512
_CONSTANTS_BYTES: Final = 8
_LEVELS: Final = 255


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit codes for the elements of each row, and a least value and a scale for each row."""
    low, high = rows.aminmax(dim=1, keepdim=True)
    scale = (high - low).clamp_min(torch.finfo(rows.dtype).tiny) / _LEVELS
    codes = ((rows - low) / scale).round_().clamp_(0, _LEVELS).to(torch.uint8)
    return codes, torch.cat([low, scale], dim=1)


def dequantise(codes: Tensor, constants: Tensor) -> Tensor:
    """The values that :func:`quantise` has made ``codes`` and ``constants`` of, about."""
    return codes.to(constants.dtype) * constants[:, 1:] + constants[:, :1]


@dataclass(frozen=True)
class Rounding:
    """The way in which float32 numbers are sent: torch.bfloat16 or torch.int8, else ValueError."""

    sent: torch.dtype

    def __post_init__(self) -> None:
        if self.sent not in (torch.bfloat16, torch.int8):
            raise ValueError(
                f"between hosts numbers go as torch.bfloat16 or torch.int8, got {self.sent!r}"
            )

    def nbytes(self, count: int) -> int:
        """The number of bytes for ``count`` numbers."""
        if self.sent == torch.bfloat16:
            return 2 * count
        return -(-count // ROW) * (ROW + _CONSTANTS_BYTES)

    def encoded(self, flat: Tensor) -> Tensor:
        """The bytes for the numbers of a flat tensor, each ``ROW`` of them by themselves."""
        if self.sent == torch.bfloat16:
            return flat.bfloat16().view(torch.uint8)
        codes, constants = quantise(pad(flat, (0, -flat.numel() % ROW)).view(-1, ROW))
        return torch.cat([codes, constants.view(torch.uint8)], dim=1).view(-1)

    def decoded(self, data: Tensor, count: int) -> Tensor:
        """The first ``count`` numbers in bytes that :meth:`encoded` has made, about."""
        if self.sent == torch.bfloat16:
            return data.view(torch.bfloat16)[:count].float()
        rows = data.view(-1, ROW + _CONSTANTS_BYTES)
        constants = rows[:, ROW:].contiguous().view(torch.float32)
        return dequantise(rows[:, :ROW], constants).view(-1)[:count]


@dataclass(frozen=True)
class HybridOptions:
    """The ``pg_options`` of backend ``hybrid``; the same on all ranks.

    Args:
        between_hosts: torch.bfloat16 (half the bytes) or torch.int8 (a quarter, and 1.6 %): sums
            and averages of float32 in all_reduce, reduce and reduce_scatter are rounded so where
            they cross from host to host. Within a host they are float32, and all ranks get the same
            bits. All other dtypes, reductions and operations stay exact. What rounding loses is
            lost: for gradients :class:`~tilework.parallel.comm_hooks.SlowLinks` adds it later.
            None: nothing is rounded.

    Raises:
        ValueError: ``between_hosts`` is another dtype.

    Example:
        >>> import torch
        >>> import tilework.distributed as dist
        >>> dist.HybridOptions(between_hosts=torch.bfloat16)
        HybridOptions(between_hosts=torch.bfloat16)
    """

    between_hosts: torch.dtype | None = None

    def __post_init__(self) -> None:
        """Refuse another dtype."""
        self.rounding()

    def rounding(self) -> Rounding | None:
        """The rounding of sums between hosts; None if there is none."""
        return None if self.between_hosts is None else Rounding(self.between_hosts)
