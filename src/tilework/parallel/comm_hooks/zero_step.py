"""Steps of an optimizer within backward: the parameters of a bucket step once it is reduced."""

from __future__ import annotations

from typing import Any, Protocol

from tilework.parallel.comm_hooks.bucket import CommHook, GradBucket
from tilework.parallel.comm_hooks.deferred import DeferredFuture


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
            if result.data_ptr() != buffer.data_ptr():
                buffer.copy_(result.reshape(buffer.shape))
            zero.step_bucket(bucket)
            return buffer

        return DeferredFuture(finish)

    return reduce_and_step


#: torch has a second variant, which starts earlier; here both are the same.
hook_with_zero_step_interleaved = hook_with_zero_step
