"""Who writes what: everything once, evenly, and fast."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import deserialize

from tilework.checkpoint.save_planning import (
    BoxToWrite,
    TensorToSave,
    assign_writers,
    cut_box,
    plan_files,
)
from tilework.layout import Box, check_boxes
from tilework.layout.box import whole_box


def replicated(name: str, shape: tuple[int, ...], ranks: tuple[int, ...]) -> TensorToSave:
    return TensorToSave(name, "F32", shape, ((whole_box(shape), ranks),))


def row_sharded(name: str, rows: int, columns: int, ranks: int) -> TensorToSave:
    size = rows // ranks
    boxes = [Box((r * size, 0), (size, columns)) for r in range(ranks)]
    return TensorToSave(
        name, "F32", (rows, columns), tuple((box, (r,)) for r, box in enumerate(boxes))
    )


shapes = st.lists(st.integers(0, 300), min_size=0, max_size=3).map(tuple)


@st.composite
def tensors(draw: Any) -> list[TensorToSave]:
    made = []
    for number in range(draw(st.integers(0, 6))):
        owners = draw(st.sets(st.integers(0, 3), min_size=1))
        made.append(replicated(f"t{number}", draw(shapes), tuple(owners)))
    return made


@settings(max_examples=60)
@given(tensors())
def test_each_element_is_written_once_by_a_rank_that_holds_it(state: list[TensorToSave]) -> None:
    written = assign_writers(state, range(4))
    for number, tensor in enumerate(state):
        boxes = [t.box for tasks in written.values() for t in tasks if t.tensor == number]
        check_boxes(tensor.shape, boxes)
        writers = {
            rank for rank, tasks in written.items() if any(t.tensor == number for t in tasks)
        }
        assert writers <= set(tensor.tiles[0][1])


def test_replicated_tensors_are_dealt_out_evenly() -> None:
    state = [replicated(f"t{n}", (1000 + n, 64), (0, 1, 2, 3)) for n in range(40)]
    loads = Counter(
        {r: sum(t.nbytes for t in own) for r, own in assign_writers(state, range(4)).items()}
    )
    assert max(loads.values()) - min(loads.values()) < 300_000  # of 10 MB


def test_ranks_with_less_of_their_own_write_more_of_what_is_shared() -> None:
    own = TensorToSave("own", "F32", (1 << 20,), ((whole_box((1 << 20,)), (0,)),))
    written = assign_writers([own, replicated("all", (1 << 10, 1 << 10), (0, 1))], range(2))
    assert [t.tensor for t in written[0]] == [0]
    assert sum(t.nbytes for t in written[1]) == 4 << 20


def test_tensors_on_ranks_that_do_not_save_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'x' has .* on ranks \[7\]"):
        assign_writers([replicated("x", (2,), (7,))], range(2))


def test_a_thousand_tensors_on_64_ranks_are_planned_fast() -> None:
    state = [row_sharded(f"layers.{n}.weight", 6400, 64, 64) for n in range(1000)]
    begun = time.perf_counter()
    written = assign_writers(state, range(64))
    plan_files(state, written[0], "x")
    print(f"planned in {time.perf_counter() - begun:.3f} s")  # a report, not a limit
    assert {len(tasks) for tasks in written.values()} == {1000}


def test_time_grows_like_the_boxes() -> None:
    """In counted steps: twice the boxes, twice the tasks."""
    small, large = ([row_sharded(f"t{n}", 64, 4, 64) for n in range(count)] for count in (50, 100))
    counts = [sum(map(len, assign_writers(s, range(64)).values())) for s in (small, large)]
    assert counts == [50 * 64, 100 * 64]


@given(shapes, st.integers(1, 5000))
def test_cut_boxes_cover_the_box(shape: tuple[int, ...], most_bytes: int) -> None:
    box = whole_box(shape)
    pieces = list(cut_box(box, 4, max(most_bytes, box.volume * 4 // 50)))
    check_boxes(shape, pieces)
    assert all(p.volume * 4 <= max(most_bytes, 4, box.volume * 4 // 50) for p in pieces)


def test_large_tensors_are_split_over_files() -> None:
    tensor = TensorToSave("x", "F16", (100, 10), ((whole_box((100, 10)), (0,)),))
    plans = plan_files([tensor], [BoxToWrite(0, whole_box((100, 10)), 2000)], "r0", 600)
    assert [sum(p.nbytes for p in plan.boxes) for plan in plans] == [600, 600, 600, 200]
    check_boxes((100, 10), [placed.box for plan in plans for placed in plan.boxes])


def test_files_are_what_safetensors_reads() -> None:
    state = [
        TensorToSave("small", "U8", (3,), ((whole_box((3,)), (0,)),)),
        TensorToSave("wide", "F64", (2, 2), ((whole_box((2, 2)), (0,)),)),
        TensorToSave("complex", "C64", (2,), ((whole_box((2,)), (0,)),)),
        TensorToSave("scalar", "F32", (), ((whole_box(()), (0,)),)),
    ]
    tasks = assign_writers(state, [0])[0]
    (plan,) = plan_files(state, tasks, "r0")
    body = b"\0" * (plan.nbytes - len(plan.header))
    listed = deserialize(plan.header + body)  # type: ignore[no-untyped-call]
    found = {name: (each["dtype"], each["shape"]) for name, each in listed}
    assert found == {
        "small": ("U8", [3]),
        "wide": ("F64", [2, 2]),
        "complex": ("F32", [2, 2]),
        "scalar": ("F32", []),
    }
    offsets = {placed.tensor: placed.offset for placed in plan.boxes}
    assert all(offsets[n] % size == 0 for n, size in ((1, 8), (2, 4), (3, 4)))
