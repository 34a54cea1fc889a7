"""The cost model's estimates, against the steps that are planned."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.layout.random_tilings import examples
from tests.tables import pairs
from tilework.layout import CostModel, Partial, Placement, Replicate, Shard, redistribution_steps
from tilework.layout.cost import AxisChange

R, P = Replicate(), Partial()
COST = CostModel()


def local_bytes(placements: list[Placement], lengths: tuple[int, ...], nbytes: int) -> float:
    for placement, length in zip(placements, lengths, strict=True):
        nbytes //= length if isinstance(placement, Shard) else 1
    return nbytes


@pairs(length=[2, 4], target=[R, P, Shard(0), Shard(1)], source=[R, P, Shard(0), Shard(1)])
def test_along_one_axis_the_estimate_is_the_price_of_the_steps(
    source: Placement, target: Placement, length: int
) -> None:
    if source == target or (target == P and source != R):
        return
    steps = redistribution_steps((64, 64), (length,), [source], [target], cost=COST)
    nbytes = local_bytes([source], (length,), 64 * 64 * 4)
    estimate = COST.redistribution_bytes(nbytes, [AxisChange(length, source, target)])
    assert estimate * COST.seconds_per_byte == pytest.approx(steps.seconds)


@examples()
@given(
    *[st.lists(st.sampled_from([R, P, Shard(0), Shard(1)]), min_size=2, max_size=2)] * 2,
)
def test_along_two_axes_it_is_of_the_same_size(
    source: list[Placement], target: list[Placement]
) -> None:
    """Steps may do two axes at once, plans cost several messages, and an axis that shards a dim
    with another one than before counts as if its shards moved."""
    target = [R if new == P != old else new for old, new in zip(source, target, strict=True)]
    steps = redistribution_steps((64, 64), (2, 2), source, target, cost=COST)
    changes = [
        AxisChange(2, old, new)
        for old, new in zip(source, target, strict=True)
        if old != new or (isinstance(old, Shard) and source.count(old) != target.count(old))
    ]
    nbytes = local_bytes(source, (2, 2), 64 * 64 * 4)
    estimate = COST.redistribution_bytes(nbytes, changes) * COST.seconds_per_byte
    assert steps.seconds / 3 <= estimate <= steps.seconds * 3 + COST.collective_seconds(nbytes)


def test_reducing_costs_at_least_a_reduce_scatter() -> None:
    least = COST.reduction_bytes(4096, 4)
    scatter = COST.redistribution_bytes(4096, [AxisChange(4, P, Shard(0))])
    assert least + COST.latency_bytes == scatter


def test_a_collective_between_hosts_costs_what_the_network_does() -> None:
    cost = CostModel(1.0, 2.0, 10.0, 20.0, hosts={0: "a", 1: "b"})
    assert cost.collective_seconds(3) == 7.0
    assert cost.collective_seconds(3, messages=4) == 10.0
    assert cost.collective_seconds(3, between_hosts=True) == 70.0 == cost.seconds(0, 1, 3)


def test_free_bytes_make_any_latency_dear() -> None:
    assert CostModel(seconds_per_byte=0.0).latency_bytes == float("inf")
