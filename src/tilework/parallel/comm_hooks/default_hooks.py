"""Averages as communication hooks, in full and in half precision, and wrappers for other hooks."""

from __future__ import annotations

from typing import Any

import torch

from tilework.comm.contract import ProcessGroup, ReduceOp
from tilework.comm.operations.internal import all_reduce
from tilework.comm.world import AnyGroup, NonMember, get_default_group
from tilework.parallel.comm_hooks.bucket import CommHook, GradBucket

BucketFuture = torch.futures.Future[Any]


def group_or_default(group: AnyGroup) -> ProcessGroup:
    """The given group; the default group for None.

    Raises:
        ValueError: This rank is not in the group.
    """
    if isinstance(group, NonMember):
        raise ValueError(
            f"process_group must include this rank, got a group of the ranks "
            f"{list(group.global_ranks)}: pass a group that this rank is in, or None for the "
            f"default group"
        )
    return get_default_group() if group is None else group


def allreduce_hook(process_group: AnyGroup, bucket: GradBucket) -> BucketFuture:
    """The average of a bucket: the same as without a hook. Collective; does not block.

    Args:
        process_group: The hook's state: the group, or None for the default group.
        bucket: The gradients.
    """
    return _average(bucket.buffer(), group_or_default(process_group))


def fp16_compress_hook(process_group: AnyGroup, bucket: GradBucket) -> BucketFuture:
    """The average of a bucket, sent in float16. Collective; does not block."""
    return _compressed(process_group, bucket, torch.float16)


def bf16_compress_hook(process_group: AnyGroup, bucket: GradBucket) -> BucketFuture:
    """The average of a bucket, sent in bfloat16. Collective; does not block."""
    return _compressed(process_group, bucket, torch.bfloat16)


def fp16_compress_wrapper(hook: CommHook) -> CommHook:
    """A hook that casts buckets to float16, calls ``hook``, and casts the result back."""
    return _wrapped(hook, torch.float16)


def bf16_compress_wrapper(hook: CommHook) -> CommHook:
    """A hook that casts buckets to bfloat16, calls ``hook``, and casts the result back."""
    return _wrapped(hook, torch.bfloat16)


def _average(buffer: torch.Tensor, group: ProcessGroup) -> BucketFuture:
    work = all_reduce(buffer, ReduceOp.AVG, group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def _compressed(process_group: AnyGroup, bucket: GradBucket, dtype: torch.dtype) -> BucketFuture:
    buffer = bucket.buffer()
    sent = _average(buffer.to(dtype), group_or_default(process_group))
    return sent.then(lambda future: buffer.copy_(future.value()))


def _wrapped(hook: CommHook, dtype: torch.dtype) -> CommHook:
    def wrapper(state: Any, bucket: GradBucket) -> BucketFuture:
        buffer = bucket.buffer()
        narrow = buffer.to(dtype)
        parts = torch.split(narrow, [gradient.numel() for gradient in bucket.gradients()])
        gradients = [
            part.view(gradient.shape)
            for part, gradient in zip(parts, bucket.gradients(), strict=True)
        ]
        inner = GradBucket(bucket.index(), narrow, gradients, bucket.parameters(), bucket.is_last())
        return hook(state, inner).then(lambda future: buffer.copy_(future.value()))

    return wrapper
