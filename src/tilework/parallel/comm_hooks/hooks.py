"""Communication hooks but PowerSGD: averages, also of 8 bits, local SGD, steps."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from tilework.comm.backends.internal import dequantise, quantise
from tilework.comm.contract import ProcessGroup, ReduceOp
from tilework.comm.operations.internal import all_gather_into_tensor, all_reduce
from tilework.comm.per_call.internal import address_of, refuse_count
from tilework.comm.world import AnyGroup, NonMember, get_default_group
from tilework.parallel.comm_hooks.bucket import CommHook, DeferredFuture, GradBucket

BucketFuture = torch.futures.Future[Any]


def group_or_default(group: AnyGroup) -> ProcessGroup:
    """The given group; the default group for None. ValueError if this rank is not in the group."""
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
    return _wrapped(allreduce_hook, torch.float16)(process_group, bucket)


def bf16_compress_hook(process_group: AnyGroup, bucket: GradBucket) -> BucketFuture:
    """The average of a bucket, sent in bfloat16. Collective; does not block."""
    return _wrapped(allreduce_hook, torch.bfloat16)(process_group, bucket)


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


def noop_hook(_: Any, bucket: GradBucket) -> BucketFuture:
    """Reduce nothing: each rank keeps its own gradients. Shows a step's time without communication.

    Local.
    """
    future: BucketFuture = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class PostLocalSGDState:
    """Settings of :func:`post_localSGD_hook`.

    Args:
        process_group: All ranks; None: the default group.
        subgroup: The ranks among which gradients are averaged later, such as those of one host;
            None: this rank alone.
        start_localSGD_iter: The first step that averages within the subgroup only.
        post_local_gradient_allreduce: False: later steps do not average at all.
    """

    def __init__(
        self,
        process_group: AnyGroup,
        subgroup: AnyGroup,
        start_localSGD_iter: int,
        post_local_gradient_allreduce: bool = True,
    ) -> None:
        self.process_group, self.subgroup = process_group, subgroup
        self.start_localSGD_iter = start_localSGD_iter
        self.post_local_gradient_allreduce = post_local_gradient_allreduce
        self.iter = 0


def post_localSGD_hook(state: PostLocalSGDState, bucket: GradBucket) -> BucketFuture:
    """The average of a bucket over all ranks, or, in later steps, within the subgroup. Collective.

    T. Lin, S. U. Stich, K. K. Patel, M. Jaggi, *Don't Use Large Mini-Batches, Use Local SGD*,
    ICLR 2020.

    Average the parameters themselves now and then: see ``tilework.parallel.PeriodicModelAverager``.
    """
    refuse_count("post_localSGD_hook")
    is_global = state.iter < state.start_localSGD_iter
    state.iter += bucket.is_last()
    if is_global:
        return allreduce_hook(state.process_group, bucket)
    if state.post_local_gradient_allreduce and state.subgroup is not None:
        return allreduce_hook(state.subgroup, bucket)
    return noop_hook(None, bucket)


def quantization_pertensor_hook(process_group: AnyGroup, bucket: GradBucket) -> BucketFuture:
    """The average of a bucket that each rank sends as 8-bit integers with a scale. Collective.

    Each of N ranks receives N bytes for each element, and a scale and an offset from each rank.
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
    """Send ``rows``, views of ``buffer``, as 8-bit integers; it becomes the ranks' average."""
    codes, constants = quantise(rows)
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
            total += dequantise(code, constant)
        mean = total.div_(group.size()).view(-1)[: buffer.numel()]
        return buffer.copy_(mean)

    return DeferredFuture(decode)


class StepsBuckets(Protocol):
    """The part of ``ZeroRedundancyOptimizer`` that the hook calls."""

    overlap_with_ddp: bool

    def step_bucket(self, bucket: GradBucket) -> None:
        """Step on this rank's share of a reduced bucket, then exchange all shares. Collective."""


def hook_with_zero_step(
    hook: CommHook, ddp: Any, zero: StepsBuckets, shard_buckets: bool = False
) -> CommHook:
    """A hook that reduces buckets by ``hook`` and steps on each while later buckets are reduced.

    At the end of backward the parameters have stepped on all ranks: leave ``step()`` out of the
    loop. Set learning rates before backward.

    Args:
        hook: Reduces a bucket.
        ddp: Accepted for torch's sake: the module whose hook this becomes.
        zero: A ``ZeroRedundancyOptimizer(..., overlap_with_ddp=True)`` of the module's parameters.
        shard_buckets: Accepted for torch's sake: parameters stay with their owners.

    Raises:
        ValueError: The optimizer was made without ``overlap_with_ddp``.
    """
    if not zero.overlap_with_ddp:
        raise ValueError(
            "hook_with_zero_step takes an optimizer that leaves its steps to the hook: construct "
            "ZeroRedundancyOptimizer(..., overlap_with_ddp=True)"
        )

    def reduce_and_step(state: Any, bucket: GradBucket) -> DeferredFuture:
        future = hook(state, bucket)

        def finish() -> Any:
            value = future.wait()
            result = value[0] if isinstance(value, list | tuple) else value
            buffer = bucket.buffer()
            if address_of(result) != address_of(buffer):
                buffer.copy_(result.reshape(buffer.shape))
            zero.step_bucket(bucket)
            return buffer

        return DeferredFuture(finish)

    return reduce_and_step


#: torch has a second variant, which starts earlier; here both are the same.
hook_with_zero_step_interleaved = hook_with_zero_step
