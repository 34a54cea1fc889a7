"""Catalogs of snapshots: every element is written once, about as much by each rank."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilework.layout import Partial, Placement, Replicate, Shard, check_boxes, mesh_tiling
from tilework.parallel.resilient.catalog import described, make_catalog, merged, tiling_of

PLACEMENTS: list[Placement] = [Shard(0), Shard(1), Replicate()]


@given(
    shapes=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=6),
    ranks=st.integers(1, 5),
    draw=st.data(),
)
def test_parts_cover_each_tensor_and_do_not_meet_in_memory(
    shapes: list[tuple[int, int]], ranks: int, draw: st.DataObject
) -> None:
    tensors = []
    for number, shape in enumerate(shapes):
        placement = draw.draw(st.sampled_from(PLACEMENTS))
        tiling = mesh_tiling(shape, list(range(ranks)), [placement])
        tensors.append(described(str(number), torch.float32, tiling))
        assert tiling_of(tensors[-1]) == tiling or tiling_of(tensors[-1]).shape == shape
    catalog = make_catalog(tensors, ranks)
    for entry in catalog.entries:
        check_boxes(entry.shape, [part.box for part in entry.parts])
    for rank in range(ranks):
        parts = [p for entry in catalog.entries for p in entry.parts if p.writer == rank]
        parts.sort(key=lambda part: part.offset)
        for before, after in pairwise(parts):
            assert before.offset + 4 * before.box.volume <= after.offset
        ends = [part.offset + 4 * part.box.volume for part in parts]
        assert max(ends, default=0) <= catalog.slot_bytes[rank]


def test_ranks_write_about_as_much() -> None:
    tiling = mesh_tiling((1000, 10), [0, 1, 2, 3], [Replicate()])
    catalog = make_catalog([described(str(n), torch.float32, tiling) for n in range(10)], 4)
    assert max(catalog.slot_bytes) < 1.02 * min(catalog.slot_bytes)
    assert catalog.total_bytes < 1.01 * 10 * 40_000


def test_a_partial_value_is_no_state() -> None:
    tiling = mesh_tiling((4,), [0, 1], [Partial()])
    with pytest.raises(ValueError, match="w is partial"):
        described("w", torch.float32, tiling)


def test_ranks_with_different_tensors_of_one_name() -> None:
    one, two = (
        described("w", torch.float32, mesh_tiling((n,), [0, 1], [Shard(0)])) for n in (4, 6)
    )
    assert merged([[one], [one], []]) == [one]
    with pytest.raises(
        ValueError, match=r"w is float32 \[4\] in 2 tiles on rank 0 and float32 \[6\]"
    ):
        merged([[one], [two]])


def test_owners_that_ranks_know_of_are_joined() -> None:
    """A mesh of two axes, of which each rank describes its own line."""
    lines = [
        described("w", torch.float32, mesh_tiling((4,), ranks, [Shard(0)]))
        for ranks in ([0, 1], [0, 1], [2, 3], [2, 3])
    ]
    (tensor,) = merged([[line] for line in lines])
    assert [owners for _, _, owners in tensor[3]] == [(0, 2), (1, 3)]
    catalog = make_catalog([tensor], 4)
    assert sorted(part.writer for part in catalog.entries[0].parts) == [0, 1, 2, 3]
