"""The c10d document's AbstractCommTest."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import tilework.distributed as dist
from tests.comm.conftest import Join, Runner
from tests.comm.dummy_backend import DummyProcessGroup
from tests.wrapper import Wrapper


def common_sequence_number(group: object, through: object) -> int:
    assert isinstance(group, dist.ProcessGroup)
    assert isinstance(through, dist.ProcessGroup)
    mine = group.get_sequence_number_for_group()
    numbers: list[int] = [-1] * dist.get_world_size(through)
    dist.all_gather_object(numbers, mine, group=through)
    assert len(set(numbers)) == 1
    return numbers[0]


def assert_sequence_numbers_count(group: object, ranks: list[int]) -> None:
    # A second group compares the numbers, so that comparing does not change them.
    through = dist.new_group(ranks)
    if not isinstance(group, dist.ProcessGroup):
        return
    assert isinstance(through, dist.ProcessGroup)
    start = common_sequence_number(group, through)
    for i in range(10):
        dist.all_reduce(torch.ones(1), group=group)
        assert common_sequence_number(group, through) == start + i + 1
    # Ranks 0 and 2 stay one behind while the others have only started.
    work = None
    if dist.get_rank(group) not in (0, 2):
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    numbers: list[tuple[int, int]] = [(-1, -1)] * dist.get_world_size(group)
    mine = (dist.get_rank(group), group.get_sequence_number_for_group())
    dist.all_gather_object(numbers, mine, group=through)
    number_of = dict(numbers)
    assert number_of[0] == number_of[2] == number_of[1] - 1
    assert {number_of[r] for r in number_of if r not in (0, 2)} == {number_of[1]}
    if work is None:
        dist.all_reduce(torch.ones(1), group=group)
    else:
        work.wait()


def test_sequence_numbers_of_the_default_group(ranks: Runner, join: Join) -> None:
    def body(rank: int) -> None:
        join(rank, 4)
        assert_sequence_numbers_count(dist.get_default_group(), list(range(4)))

    ranks(4, body)


def test_sequence_numbers_of_a_sub_group(ranks: Runner, join: Join) -> None:
    def body(rank: int) -> None:
        join(rank, 4)
        members = [0, 1, 2]
        assert_sequence_numbers_count(dist.new_group(members), members)

    ranks(4, body)


def test_sequence_numbers_start_equal(ranks: Runner, join: Join) -> None:
    def body(rank: int) -> None:
        join(rank, 3)
        for group in (dist.get_default_group(), dist.new_group([0, 1])):
            if not dist.rank_not_in_group(group):
                common_sequence_number(group, group)

    ranks(3, body)


def test_ranks_outside_a_group_are_warned_once(processes: Runner, tmp_path: Path) -> None:
    # Between processes only: which warnings are shown is a matter of the whole process.
    def body(rank: int) -> None:
        store = dist.FileStore(os.fspath(tmp_path / "store"), 2)
        dist.init_process_group("shm", world_size=2, rank=rank, store=store)
        group = dist.new_group([0])
        x, xs = torch.zeros(2, 2), [torch.zeros(2, 2)]
        calls: dict[str, Callable[[], object]] = {
            "all_gather": lambda: dist.all_gather(xs, x, group=group),
            "all_reduce": lambda: dist.all_reduce(x, group=group),
            "barrier": lambda: dist.barrier(group=group),
            "broadcast": lambda: dist.broadcast(x, src=0, group=group),
        }
        for name, call in calls.items():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert call() is None
                assert call() is None
            texts = [str(w.message) for w in caught if w.category is UserWarning]
            assert len(texts) == (rank == 1), texts
            for text in texts:
                assert name in text
                assert "does not belong to" in text

    processes(2, body)


def test_rank_membership(ranks: Runner, join: Join) -> None:
    def body(rank: int) -> None:
        join(rank, 2)
        group = dist.new_group(ranks=[1])
        stranger = DummyProcessGroup(rank, 2)
        assert dist.get_group_rank(group, 1) == 0
        with pytest.raises(ValueError, match="not part of group"):
            dist.get_group_rank(group, 0)
        with pytest.raises(ValueError, match="not registered"):
            dist.get_group_rank(stranger, 0)
        assert dist.get_global_rank(group, 0) == 1
        with pytest.raises(ValueError, match="not part of group"):
            dist.get_global_rank(group, 1)
        with pytest.raises(ValueError, match="not registered"):
            dist.get_global_rank(stranger, 0)
        assert dist.get_process_group_ranks(group) == [1]

    ranks(2, body)


def test_different_dtypes_in_one_call(ranks: Runner, join: Join) -> None:
    def body(rank: int) -> None:
        join(rank, 2)
        single, half = torch.ones(2, 2) * 7, (torch.ones(2, 2) * 7).half()
        singles = [torch.zeros(2, 2) for _ in range(2)]
        mixed = [singles[0], singles[1].half()]
        calls: list[Callable[[], object]] = [
            lambda: dist.all_gather(mixed, single),
            lambda: dist.all_gather(singles, half),
            lambda: dist.all_gather_coalesced([mixed], singles),
            lambda: dist.all_gather_coalesced([singles], mixed),
            lambda: dist.all_reduce_coalesced(mixed),
            lambda: dist.reduce_scatter(single, mixed),
            lambda: dist.reduce_scatter(half, singles),
            lambda: dist.all_to_all_single(half, single),
            lambda: dist.all_to_all(mixed, singles),
            lambda: dist.all_to_all(singles, mixed),
            lambda: dist.scatter(single, mixed),
            lambda: dist.scatter(half, singles),
            lambda: dist.gather(half, singles),
            lambda: dist.gather(single, mixed),
        ]
        for call in calls:
            with pytest.raises(ValueError, match="tensors with different dtypes"):
                call()
        dist.all_reduce(single)
        assert single.tolist() == [[14.0] * 2] * 2

    ranks(2, body)


def test_complex_tensors_count_as_pairs_of_reals(ranks: Runner, join: Join) -> None:
    def body(rank: int) -> None:
        join(rank, 2)
        real = torch.tensor([1.0 + rank, 2.0 + rank])
        reals = [torch.zeros(2), torch.zeros(2)]
        mixed = [torch.zeros(2), torch.zeros((), dtype=torch.complex64)]
        for source in (real, torch.view_as_complex(real)):
            for outputs in (reals, mixed):
                for output in outputs:
                    output.zero_()
                dist.all_gather(outputs, source)
                assert torch.view_as_complex(outputs[0].float()).item() == 1 + 2j
                second = outputs[1]
                second = second if second.is_complex() else torch.view_as_complex(second)
                assert second.item() == 2 + 3j

    ranks(2, body)


def test_bool_tensors(ranks: Runner, join: Join) -> None:
    def body(rank: int) -> None:
        join(rank, 2)
        mine = torch.tensor([1, 0, 0, 1] if rank == 0 else [0, 0, 0, 0], dtype=torch.bool)
        dist.broadcast(mine, src=0)
        assert mine.tolist() == [True, False, False, True]

    ranks(2, body)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_that_cannot_be_moved_are_named(ranks: Runner, join: Join) -> None:
    def body(rank: int) -> None:
        join(rank, 2)
        for kind, tensor in {
            "meta": torch.ones(2, device="meta"),
            "nested": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
        }.items():
            with pytest.raises(ValueError, match=f"tensor is a {kind} tensor, which collectives"):
                dist.all_reduce(tensor)

    ranks(2, body)


def test_wrappers_without_memory_are_named(ranks: Runner, join: Join) -> None:
    class Named(torch.Tensor):
        pass

    def body(rank: int) -> None:
        join(rank, 2)
        for call in (dist.all_reduce, lambda x: dist.all_gather([x, x], torch.ones(2))):
            with pytest.raises(TypeError, match="is a Wrapper, which has no memory of its own"):
                call(Wrapper())
        named = torch.ones(2).as_subclass(Named)
        dist.all_reduce(named)
        assert named.tolist() == [2.0, 2.0]

    ranks(2, body)
