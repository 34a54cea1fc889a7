"""The assignment of gradients to buckets: pure, and the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tilework.comm.per_call.internal import lacks_memory
from tilework.parallel.data_parallel.leaves import grad_dtype_of

#: The limit of the first bucket: small, so that the reduction starts early in backward.
FIRST_BUCKET_BYTES = 1 << 20
#: The limit of all other buckets where the user sets none.
DEFAULT_BUCKET_BYTES = 25 << 20


@dataclass(frozen=True)
class BucketPlan:
    """The members of each bucket, by index, and the bytes at which it was closed, in order."""

    buckets: tuple[tuple[int, ...], ...]
    size_limits: tuple[int, ...]


@dataclass
class _Open:
    #: The numbers of the tensors in the bucket, the size of these, and the limit, by index.
    indices: list[int] = field(default_factory=list)
    size_bytes: int = 0
    limit: int = 0


def plan_buckets(
    tensors: Sequence[Tensor],
    size_limits: Sequence[int],
    *,
    sparse: Sequence[bool] = (),
    indices: Sequence[int] = (),
) -> BucketPlan:
    """The bucket plan of gradients like ``tensors``. Local; looks at shapes and dtypes only.

    A bucket holds gradients of one dtype and device, in the order of ``tensors``, and is closed
    when it reaches a limit. The first bucket of each dtype and device takes the first of
    ``size_limits``, the next the second, and so on; the last limit serves all others. A sparse
    gradient has a separate bucket.

    Args:
        tensors: The parameters, in the order in which their gradients are expected.
        size_limits: In bytes; at least one.
        sparse: For each tensor True if the gradient is sparse; empty: none is.
        indices: The numbers to use for the tensors in the result; empty: their positions. If empty,
            buckets are sorted by their first index, as dtypes may interleave.

    Raises:
        ValueError: There are no tensors or limits, or the lists have different lengths.

    Example:
        >>> import torch
        >>> plan_buckets([torch.empty(10) for _ in range(4)], [40, 80])
        BucketPlan(buckets=((0,), (1, 2), (3,)), size_limits=(40, 80, 80))
    """
    _check(tensors, size_limits, sparse, indices)
    names = list(indices) or list(range(len(tensors)))
    opened: dict[Any, _Open] = {}
    closed: list[tuple[list[int], int]] = []
    for place, tensor in enumerate(tensors):
        if sparse and sparse[place]:
            closed.append(([names[place]], 0))
            continue
        dtype = grad_dtype_of(tensor)
        bucket = opened.setdefault((dtype, tensor.device), _Open())
        bucket.indices.append(names[place])
        bucket.size_bytes += tensor.numel() * dtype.itemsize
        if bucket.size_bytes >= size_limits[bucket.limit]:
            closed.append((bucket.indices, size_limits[bucket.limit]))
            bucket.indices, bucket.size_bytes = [], 0
            bucket.limit = min(bucket.limit + 1, len(size_limits) - 1)
    closed += [(rest.indices, size_limits[rest.limit]) for rest in opened.values() if rest.indices]
    if not indices:
        closed.sort(key=lambda bucket: min(bucket[0]))
    return BucketPlan(
        tuple(tuple(members) for members, _ in closed), tuple(limit for _, limit in closed)
    )


def _check(
    tensors: Sequence[Tensor],
    size_limits: Sequence[int],
    sparse: Sequence[bool],
    indices: Sequence[int],
) -> None:
    if not tensors:
        raise ValueError("buckets are made of at least one tensor, got none")
    if not size_limits or any(limit <= 0 for limit in size_limits):
        raise ValueError(
            f"bucket size limits are positive numbers of bytes, at least one; got "
            f"{list(size_limits)}"
        )
    for name, others in (("expect_sparse_gradient", sparse), ("tensor_indices", indices)):
        if others and len(others) != len(tensors):
            raise ValueError(
                f"{name} has an entry for each of the {len(tensors)} tensors or is empty, got "
                f"{len(others)}"
            )


def compute_bucket_assignment_by_size(
    tensors: Sequence[Tensor],
    bucket_size_limits: Sequence[int],
    expect_sparse_gradient: Sequence[bool] = (),
    tensor_indices: Sequence[int] = (),
) -> tuple[list[list[int]], list[int]]:
    """The indices of the tensors in each bucket, and the size limit of each bucket.

    The same as :func:`plan_buckets`, with torch's name and result. Local.

    Example:
        >>> import torch
        >>> floats = [torch.empty(50), torch.empty(25, dtype=torch.double)] * 2
        >>> compute_bucket_assignment_by_size(floats, [400])
        ([[0, 2], [1, 3]], [400, 400])
    """
    plan = plan_buckets(
        tensors, bucket_size_limits, sparse=expect_sparse_gradient, indices=tensor_indices
    )
    return [list(bucket) for bucket in plan.buckets], list(plan.size_limits)


def size_limits_of(
    bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None
) -> tuple[int, ...]:
    """The buckets' size limits in bytes, in the order of reduction, from settings in MiB."""
    if bucket_cap_mb_list:
        return tuple(map(bucket_bytes_of, bucket_cap_mb_list))
    size = bucket_bytes_of(bucket_cap_mb)
    return min(FIRST_BUCKET_BYTES, size), size


def bucket_bytes_of(bucket_cap_mb: float | None) -> int:
    """A bucket's size limit in bytes, from a positive finite number of MiB."""
    if bucket_cap_mb is None:
        return DEFAULT_BUCKET_BYTES
    if not isinstance(bucket_cap_mb, int | float):
        raise TypeError(f"bucket_cap_mb must be a number (MiB) or None, got {bucket_cap_mb!r}")
    if not 0 < bucket_cap_mb < math.inf:
        raise ValueError(f"bucket_cap_mb must be positive and finite (MiB), got {bucket_cap_mb}")
    return max(1, int(bucket_cap_mb * (1 << 20)))


def element_count(parameter: Tensor) -> int:
    """The number of elements of a parameter's gradient in a bucket; 0 on the meta device."""
    return 0 if lacks_memory(parameter) else parameter.numel()
