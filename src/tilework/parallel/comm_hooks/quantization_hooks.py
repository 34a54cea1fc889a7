"""Buckets sent as 8-bit integers: an all_gather of quantised gradients, averaged after it."""

from __future__ import annotations

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup
from tilework.comm.operations.internal import all_gather_into_tensor
from tilework.comm.world import AnyGroup
from tilework.parallel.comm_hooks.bucket import GradBucket
from tilework.parallel.comm_hooks.default_hooks import (
    BucketFuture,
    group_or_default,
)
from tilework.parallel.comm_hooks.deferred import DeferredFuture

_LEVELS = 255


def quantization_pertensor_hook(process_group: AnyGroup, bucket: GradBucket) -> BucketFuture:
    """The average of a bucket that each rank sends as 8-bit integers with a scale. Collective.

    Each of N ranks receives N bytes for each element, and a scale and an offset from each rank.

    Args:
        process_group: The hook's state: the group, or None for the default group.
        bucket: The gradients.
    """
    buffer = bucket.buffer()
    return _quantised(buffer, buffer.view(1, -1), group_or_default(process_group))


def quantization_perchannel_hook(
    process_group: AnyGroup, bucket: GradBucket, bucket_size: int = 512
) -> BucketFuture:
    """:func:`quantization_pertensor_hook` with a scale for every ``bucket_size`` elements.

    More precise where gradients of one bucket have different magnitudes.
    """
    buffer = bucket.buffer()
    rows = -(-buffer.numel() // bucket_size)
    padded = torch.nn.functional.pad(buffer, (0, rows * bucket_size - buffer.numel()))
    return _quantised(buffer, padded.view(rows, bucket_size), group_or_default(process_group))


def _quantised(buffer: Tensor, rows: Tensor, group: ProcessGroup) -> BucketFuture:
    """Send ``rows``, a view of a bucket, as 8-bit integers; ``buffer`` becomes the ranks' average.

    Each row is sent with a scale and an offset.
    """
    low, high = rows.aminmax(dim=1, keepdim=True)
    scale = (high - low).clamp_min(torch.finfo(rows.dtype).tiny) / _LEVELS
    codes = ((rows - low) / scale).round_().clamp_(0, _LEVELS).to(torch.uint8)
    constants = torch.cat([low, scale], dim=1)
    all_codes = codes.new_empty(group.size(), *codes.shape)
    all_constants = constants.new_empty(group.size(), *constants.shape)
    works = [
        all_gather_into_tensor(all_codes, codes, group, async_op=True),
        all_gather_into_tensor(all_constants, constants, group, async_op=True),
    ]

    def decode() -> Tensor:
        for work in works:
            assert work is not None
            work.wait()
        total = torch.zeros_like(rows)
        for code, constant in zip(all_codes, all_constants, strict=True):  # in the order of ranks
            total += code.to(rows.dtype) * constant[:, 1:] + constant[:, :1]
        mean = total.div_(group.size()).view(-1)[: buffer.numel()]
        return buffer.copy_(mean)

    return DeferredFuture(decode)
