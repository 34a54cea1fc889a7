"""Who reads what: all that is needed, hardly more, and what is shared once."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tilework.checkpoint.format import Part, SavedTensor, chunk_count
from tilework.checkpoint.load_planning import Wanted, blocks_of, plan_load, span
from tilework.checkpoint.save_planning import cut_box
from tilework.layout import Box, Shard, check_boxes, mesh_tiling
from tilework.layout.box import whole_box

CHUNK = 1 << 10


def saved(shape: tuple[int, ...], boxes: list[Box]) -> SavedTensor:
    parts = [Part(b, "f", 0, b.volume * 4, (0,) * chunk_count(b.volume * 4, CHUNK)) for b in boxes]
    return SavedTensor("x", "F32", shape, tuple(parts))


def sharded(shape: tuple[int, ...], dim: int, ranks: int) -> list[Box]:
    return [tile.box for tile in mesh_tiling(shape, list(range(ranks)), [Shard(dim)]).tiles]


def wanted(tensor: SavedTensor, boxes: list[Box]) -> Wanted:
    return Wanted(tensor, tuple((box, (rank,)) for rank, box in enumerate(boxes)))


def test_the_same_layout_is_read_straight() -> None:
    boxes = sharded((400, 10), 0, 4)
    want = wanted(saved((400, 10), boxes), boxes)
    for rank in range(4):
        plan = plan_load([want], range(4), rank, CHUNK)
        assert [read.need.box for read in plan.reads] == [boxes[rank]]
        assert not any(plan.units.values())


def test_other_rows_are_read_straight() -> None:
    want = wanted(saved((400, 100), sharded((400, 100), 0, 4)), sharded((400, 100), 0, 3))
    plans = [plan_load([want], range(3), rank, CHUNK) for rank in range(3)]
    assert [len(plan.reads) for plan in plans] == [2, 2, 2]
    assert not any(any(plan.units.values()) for plan in plans)


def test_columns_are_read_once_by_all_together() -> None:
    want = wanted(saved((4096, 256), [whole_box((4096, 256))]), sharded((4096, 256), 1, 4))
    plan = plan_load([want], range(4), 2, 1 << 20)
    assert not plan.reads
    volumes = [sum(u.stop - u.start for u in units) for units in plan.units.values()]
    assert sum(volumes) == 4096 * 256
    assert sorted(volumes) == [0, 0, 524288, 524288]  # two units of 2 MiB


def test_columns_are_split_where_runs_are_long() -> None:
    for width, split in ((512, 1), (508, 0)):  # of 4 bytes, on 4 ranks
        shape = (64, width)
        want = wanted(saved(shape, [whole_box(shape)]), sharded(shape, 1, 4))
        plan = plan_load([want], range(4), 2, CHUNK, splits=True)
        assert (len(plan.split), len(plan.shared)) == (split, 1 - split)
        assert not plan.reads


def test_what_nobody_needs_is_no_reason_to_split() -> None:
    want = wanted(saved((64, 512), [whole_box((64, 512))]), sharded((64, 512), 1, 4)[:3])
    plan = plan_load([want], range(4), 2, CHUNK, splits=True)
    assert not plan.split
    assert plan.shared


def test_what_all_need_is_read_once() -> None:
    tensor = saved((4096, 1024), [whole_box((4096, 1024))])
    want = Wanted(tensor, ((whole_box((4096, 1024)), (0, 1, 2, 3)),))
    plan = plan_load([want], range(4), 1, 1 << 20)
    assert {sum(u.stop - u.start for u in units) for units in plan.units.values()} == {1 << 20}


def test_each_host_reads_what_its_ranks_need() -> None:
    tensor = saved((4096, 1024), [whole_box((4096, 1024))])
    want = Wanted(tensor, ((whole_box((4096, 1024)), (0, 1, 2, 3)),))
    plan = plan_load([want], [2, 3], 3, 1 << 20)
    assert set(plan.units) == {2, 3}
    assert sum(u.stop - u.start for units in plan.units.values() for u in units) == 4096 * 1024


def test_one_rank_reads_by_itself() -> None:
    want = wanted(saved((64, 64), [whole_box((64, 64))]), [Box((0, 0), (64, 3))])
    assert len(plan_load([want], [0], 0, CHUNK).reads) == 1


def test_plans_of_many_boxes() -> None:
    boxes = list(cut_box(whole_box((20_000, 4)), 4, 16))
    want = wanted(saved((20_000, 4), boxes), sharded((20_000, 4), 0, 8))
    assert len(plan_load([want], range(8), 3, CHUNK).reads) == 2500


sizes = st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple)


@settings(max_examples=60)
@given(sizes, st.data())
def test_blocks_have_each_element_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    box = Box(tuple(range(len(shape))), shape)
    start = data.draw(st.integers(0, box.volume))
    stop = data.draw(st.integers(start, box.volume))
    spans = [span(box, block) for _, block in blocks_of(box, start, stop)]
    assert [low for low, _ in spans] == [start + at for at, _ in blocks_of(box, start, stop)]
    assert sum(high - low for low, high in spans) == stop - start


@settings(max_examples=60)
@given(
    st.integers(1, 5), st.integers(1, 5), st.integers(0, 1), st.integers(0, 1), st.integers(1, 40)
)
def test_every_rank_gets_all_that_it_wants(
    before: int, after: int, dim: int, other: int, rows: int
) -> None:
    shape = (rows, 30)
    target = sharded(shape, other, after)
    want = wanted(saved(shape, sharded(shape, dim, before)), target)
    plans = [plan_load([want], range(after), rank, 64) for rank in range(after)]
    units = Counter((u.part.box, u.start, u.stop) for own in plans[0].units.values() for u in own)
    assert set(units.values()) <= {1}
    for rank, box in enumerate(target):
        if box.empty:
            continue
        got = [read.need.box for read in plans[rank].reads]
        for own in plans[rank].units.values():
            for unit in own:
                for need in unit.needs:
                    if rank in need.ranks:
                        blocks = blocks_of(unit.part.box, unit.start, unit.stop)
                        shared = [block.intersection(need.box) for _, block in blocks]
                        got.extend(each for each in shared if each is not None)
        check_boxes(box.sizes, [each.relative_to(box) for each in got])


def test_layers_that_are_alike_are_planned_as_if_alone() -> None:
    rows, columns = sharded((4096, 1024), 0, 4), sharded((4096, 1024), 1, 4)
    tensors = [saved((4096, 1024), rows), saved((4096, 1024), [whole_box((4096, 1024))])]
    wants = [wanted(tensor, boxes) for tensor in tensors for boxes in (rows, columns)]
    wants.append(Wanted(tensors[0], ((whole_box((4096, 1024)), (0, 1, 2, 3)),)))
    together = plan_load([*wants, *wants], range(4), 1, 1 << 20, splits=True)
    for number in range(2 * len(wants)):
        alone = plan_load([wants[number % len(wants)]], range(4), 1, 1 << 20, splits=True)
        for kind in ("reads", "split", "shared"):
            own = [each for each in getattr(together, kind) if each.tensor == number]
            assert [each[1:] for each in own] == [each[1:] for each in getattr(alone, kind)]
