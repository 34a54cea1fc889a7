"""Results are the same, to the bit, whatever the sizes at which algorithms take over."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.csrc.core_ranks import SLOT_BYTES, Rank, run_threads
from tests.tables import each
from tilework import _core

pytestmark = pytest.mark.usefixtures("reading_as_tunables_say")

#: Threads read each other as processes do.
APART = {"threads_apart": 1}
sizes_of_messages = st.sampled_from([0, 64, 1000, 4096, 20_000, _core.NEVER_BYTES])
tunables = st.fixed_dictionaries(dict.fromkeys(_core.DEFAULT_TUNABLES, sizes_of_messages))


def own(rank: int, count: int) -> Tensor:
    """Numbers whose sums are rounded."""
    return torch.rand(count, generator=torch.Generator().manual_seed(rank)) - 0.5


def everything(rank: Rank, count: int) -> list[Tensor]:
    """Results of all operations that may read peers' memory, once it is known who can."""
    me, size = rank.rank, rank.size
    rank.run("barrier")
    results = []
    for _ in range(2):
        reduced, moved = own(me, count), own(me, count)
        rank.run("all_reduce", [reduced], [reduced], op="sum")
        rank.run("broadcast", [], [moved], root=size - 1)
        gathered, swapped = torch.zeros(size, count), torch.zeros(size, count)
        rank.run("all_gather", [own(me, count)], list(gathered))
        parts = [own(me * size + to, count + to) for to in range(size)]
        scattered = torch.zeros(count + me)
        rank.run("all_to_all", [part[:count] for part in parts], list(swapped))
        rank.run("reduce_scatter", [part[:count] for part in parts], [reduced[:count]], op="sum")
        rank.run("scatter", parts if me == 0 else [], [scattered])
        uneven = [torch.zeros(count + r) for r in range(size)] if me == 1 else []
        rank.run("gather", [own(me, count + me)], uneven, root=1)
        in_place = torch.stack([part[:count] for part in parts])
        rank.run("all_to_all", list(in_place), list(in_place))
        assert torch.equal(in_place, swapped)
        results += [reduced, moved, gathered, swapped, scattered, *uneven]
    return results


@pytest.mark.parametrize("size", [2, 3])
@settings(max_examples=12)
@given(chosen=tunables, count=st.sampled_from([1, 300, 5000]))
def test_bits_do_not_depend_on_tunables(size: int, chosen: dict[str, int], count: int) -> None:
    def program(rank: Rank) -> list[Tensor]:
        return everything(rank, count)

    never = dict.fromkeys(_core.DEFAULT_TUNABLES, _core.NEVER_BYTES)
    expected = run_threads(size, program, SLOT_BYTES, never)
    for got, wanted in zip(run_threads(size, program, SLOT_BYTES, chosen), expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_threads_read_each_other() -> None:
    def program(rank: Rank) -> tuple[int, str]:
        everything(rank, 5000)
        return rank.group.statistics()["read_bytes"], rank.group.single_copy()

    for read, how in run_threads(2, program, SLOT_BYTES, {"thread_copy_bytes": 1000}):
        assert read > 5 * 5000 * 4
        assert how == "possible: ranks are threads of one process"


@pytest.mark.parametrize("count", [9000, 3_000_000])
def test_messages_are_read_from_their_senders(count: int) -> None:
    """Both send first; one message comes before its receive, and goes through the ring."""

    def program(rank: Rank) -> tuple[int, bool]:
        other = 1 - rank.rank
        early, late = own(2 + rank.rank, count), own(4 + rank.rank, count)
        got = torch.zeros(2, count)
        sends = [rank.isend(other, early, tag=1), rank.isend(other, late, tag=2)]
        receives = [rank.irecv(other, got[1], tag=2), rank.irecv(other, got[0], tag=1)]
        for completion in [*receives, *sends]:
            assert completion.wait(120.0)
        again = rank.irecv(other, got[0], tag=3)
        rank.isend(other, early, tag=3).wait(120.0)
        assert again.wait(120.0)
        right = torch.equal(got, torch.stack([own(2 + other, count), own(4 + other, count)]))
        return rank.group.statistics()["read_bytes"], right

    for read, right in run_threads(2, program, SLOT_BYTES, {"single_copy_message_bytes": 1000}):
        assert right
        assert read >= 4 * count


def test_a_send_that_is_given_up_brings_nothing() -> None:
    def program(rank: Rank) -> str:
        tensor = own(rank.rank, 100_000)
        rank.run("barrier")
        if rank.rank == 0:
            return str(fault_of(rank.isend(1, tensor, timeout=0.05)))
        time.sleep(0.2)
        return str(fault_of(rank.irecv(0, tensor, timeout=0.3)))

    results = run_threads(2, program, SLOT_BYTES, {"single_copy_message_bytes": 1000})
    assert ["timeout" in result for result in results] == [True, True]


def fault_of(completion: _core.Completion) -> object:
    with pytest.raises(_core.Fault):
        completion.wait(120.0)
    return completion.fault()


def test_lengths_outside_the_range_go_through_outboxes() -> None:
    counts = (100, 1000, 5000)  # 400 B, 4,000 B and 20,000 B, of which the second is read

    def program(rank: Rank) -> list[int]:
        for _ in range(2):
            rank.run("barrier")
        read = []
        for count in counts:
            before = rank.group.statistics()["read_bytes"]
            tensor = own(0, count) if rank.rank == 0 else torch.zeros(count)
            rank.run("broadcast", [], [tensor])
            assert torch.equal(tensor, own(0, count))
            read.append(rank.group.statistics()["read_bytes"] - before)
        return read

    tunables = {"single_copy_rooted_bytes": 4000, "single_copy_rooted_below_bytes": 20_000}
    assert run_threads(2, program, SLOT_BYTES, tunables | APART)[1] == [0, 4000, 0]


def test_uneven_parts_inside_and_outside_the_range() -> None:
    counts = (100, 1000, 5000)

    def program(rank: Rank) -> None:
        for _ in range(2):
            rank.run("barrier")
        mine = counts[rank.rank]
        for _ in range(2):
            gathered = [torch.zeros(count) for count in counts]
            rank.run("all_gather", [own(rank.rank, mine)], gathered)
            assert all(torch.equal(part, own(i, counts[i])) for i, part in enumerate(gathered))
            total = torch.zeros(mine)
            parts = [own(rank.rank + to, count) for to, count in enumerate(counts)]
            rank.run("reduce_scatter", parts, [total], op="max")
            terms = [own(peer + rank.rank, mine) for peer in range(len(counts))]
            assert torch.equal(total, torch.stack(terms).amax(0))
        assert rank.group.single_copy().startswith("possible")

    names = ("single_copy_all_gather", "single_copy_reduce_scatter")
    tunables = {f"{name}_bytes": 4000 for name in names}
    tunables |= {f"{name}_below_bytes": 20_000 for name in names}
    run_threads(len(counts), program, SLOT_BYTES, tunables | APART)


@each("slow", [0, 1, _core.NEVER_BYTES])
def test_stores_past_the_caches_bring_the_same(slow: int) -> None:
    """Always, from the third slow one on, and never."""
    count = 20_000

    def program(rank: Rank) -> None:
        for attempt in range(4):
            tensor = own(rank.rank, count) + attempt
            rank.run("all_reduce", [tensor], [tensor], op="max")
            assert torch.equal(tensor, torch.maximum(own(0, count), own(1, count)) + attempt)
            other, got = 1 - rank.rank, torch.zeros(count)
            send = rank.isend(other, own(rank.rank, count))
            assert rank.irecv(other, got).wait(120.0)
            assert send.wait(120.0)
            assert torch.equal(got, own(other, count))

    run_threads(2, program, 1 << 20, {"slow_outbox_ns": slow, "one_shot_bytes": 0})


def test_a_tunable_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="there is no speed"):
        _core.create_segment(2, SLOT_BYTES, b"", {"speed": 1})
