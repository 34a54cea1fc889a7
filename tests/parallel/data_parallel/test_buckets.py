"""The assignment of gradients to buckets, without ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilework.parallel import compute_bucket_assignment_by_size
from tilework.parallel.data_parallel.buckets import BucketPlan, bucket_bytes_of, plan_buckets


def floats(*sizes: int) -> list[torch.Tensor]:
    return [torch.empty(size) for size in sizes]


def mixed(*sizes: int) -> list[torch.Tensor]:
    """Floats and doubles by turns."""
    return [
        torch.empty(size, dtype=torch.double if at % 2 else torch.float)
        for at, size in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("tensors", "limits", "buckets", "closed_at"),
    [
        (floats(100, 200, 100, 50), [400], [[0], [1], [2], [3]], [400] * 4),
        (mixed(50, 25, 50, 25, 50, 25), [400], [[0, 2], [1, 3], [4], [5]], [400] * 4),
        (floats(10, 10, 10, 10), [40, 80], [[0], [1, 2], [3]], [40, 80, 80]),
        (
            mixed(50, 25, 50, 25, 50, 25),
            [200, 400],
            [[0], [1], [2, 4], [3, 5]],
            [200, 200, 400, 400],
        ),
    ],
)
def test_limits_count_for_each_dtype(
    tensors: list[torch.Tensor], limits: list[int], buckets: list[list[int]], closed_at: list[int]
) -> None:
    assert compute_bucket_assignment_by_size(tensors, limits) == (buckets, closed_at)


def test_devices_do_not_mix() -> None:
    tensors = [torch.empty(4), torch.empty(4, device="meta"), torch.empty(4)]
    assert plan_buckets(tensors, [1000]).buckets == ((0, 2), (1,))


def test_sparse_gradients_have_buckets_of_their_own() -> None:
    plan = plan_buckets(floats(4, 4, 4), [1000], sparse=[False, True, False])
    assert plan == BucketPlan(((0, 2), (1,)), (1000, 0))


def test_indices_name_the_tensors() -> None:
    buckets, _ = compute_bucket_assignment_by_size(floats(10, 10, 10), [40, 80], [], [7, 5, 3])
    assert buckets == [[7], [5, 3]]


def test_a_plan_follows_the_order_of_gradients() -> None:
    plan = plan_buckets(floats(2, 2, 2), [16], indices=[1, 0, 2])
    assert plan.buckets == ((1, 0), (2,))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], [10]), "at least one tensor"),
        ((floats(1), []), "positive numbers of bytes"),
        ((floats(1), [0]), "positive numbers of bytes"),
        ((floats(1, 1), [10], [True]), "expect_sparse_gradient has an entry for each of the 2"),
        ((floats(1, 1), [10], [], [3]), "tensor_indices has an entry for each of the 2"),
    ],
)
def test_bad_arguments(arguments: tuple[list[torch.Tensor], list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute_bucket_assignment_by_size(*arguments)


def test_bucket_sizes_are_given_in_mib() -> None:
    assert bucket_bytes_of(None) == 25 << 20
    assert bucket_bytes_of(0.5) == 1 << 19
    with pytest.raises(ValueError, match="bucket_cap_mb must be positive"):
        bucket_bytes_of(0)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.booleans(), st.booleans()), min_size=1, max_size=30),
    st.lists(st.integers(1, 400), min_size=1, max_size=3),
)
def test_every_tensor_is_in_one_bucket_of_its_dtype(
    kinds: list[tuple[int, bool, bool]], limits: list[int]
) -> None:
    tensors = [
        torch.empty(size, dtype=torch.double if double else torch.float)
        for size, double, _ in kinds
    ]
    sparse = [each[2] for each in kinds]
    plan = plan_buckets(tensors, limits, sparse=sparse)
    assert sorted(i for bucket in plan.buckets for i in bucket) == list(range(len(tensors)))
    for bucket, limit in zip(plan.buckets, plan.size_limits, strict=True):
        assert len({tensors[i].dtype for i in bucket}) == 1
        if len(bucket) > 1:
            assert sum(tensors[i].nbytes for i in bucket[:-1]) < limit
            assert not any(sparse[i] for i in bucket)
