"""The sampler, against torch's, by group and by mesh."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler as TorchSampler

import tilework.distributed as dist
from tests.tables import each
from tilework.data import DistributedSampler
from tilework.mesh import init_device_mesh
from tilework.testing import run_ranks


@each("length", [0, 1, 7, 8, 9])
@each("drop_last", [False, True])
def test_rows_are_those_of_torch(length: int, drop_last: bool) -> None:
    for rank in range(4):
        if length == 0:
            own = DistributedSampler(range(0), 4, rank, drop_last=drop_last)
            assert list(own) == []
            assert len(own) == 0
            continue
        data = torch.arange(length)
        theirs: TorchSampler[int] = TorchSampler(
            TensorDataset(data), 4, rank, seed=2, drop_last=drop_last
        )
        own = DistributedSampler(data, 4, rank, seed=2, drop_last=drop_last)
        for epoch in (0, 3):
            theirs.set_epoch(epoch)
            own.set_epoch(epoch)
            assert list(own) == list(theirs)
            assert len(own) == len(theirs)


def test_the_default_group_divides() -> None:
    def program(rank: int) -> list[int]:
        return list(DistributedSampler(range(6), shuffle=False))

    assert run_ranks(3, program) == [[0, 3], [1, 4], [2, 5]]


def test_a_group_of_some_ranks_divides() -> None:
    def program(rank: int) -> list[int] | str:
        group = dist.new_group([1, 2])
        try:
            return list(DistributedSampler(range(4), shuffle=False, group=group))
        except ValueError as error:
            return str(error)

    first, *others = run_ranks(3, program)
    assert "not in the group" in str(first)
    assert others == [[0, 2], [1, 3]]


def test_an_axis_of_a_mesh_divides() -> None:
    def program(rank: int) -> list[list[int]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        by = (mesh["dp"], mesh["tp"], mesh)
        return [list(DistributedSampler(range(4), shuffle=False, mesh=part)) for part in by]

    assert run_ranks(4, program) == [
        [[0, 2], [0, 2], [0]],
        [[0, 2], [1, 3], [1]],
        [[1, 3], [0, 2], [2]],
        [[1, 3], [1, 3], [3]],
    ]


def test_without_a_group_there_is_one_rank() -> None:
    assert list(DistributedSampler(range(3), shuffle=False)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("lengths", "seeds", "message"),
    [
        ((4, 5), (0, 0), "length=4 on rank 0 does not match with length=5 on rank 1"),
        ((4, 4), (0, 7), "seed=0 on rank 0 does not match with seed=7 on rank 1"),
    ],
)
def test_ranks_that_differ_all_raise(
    lengths: tuple[int, int], seeds: tuple[int, int], message: str
) -> None:
    def program(rank: int) -> str:
        with pytest.raises(ValueError, match="the same rows") as caught:
            DistributedSampler(range(lengths[rank]), seed=seeds[rank])
        return str(caught.value)

    assert all(message in text for text in run_ranks(2, program))


def test_what_is_wrong_on_one_rank_raises_on_all() -> None:
    def program(rank: int) -> str:
        dataset = range(4) if rank else object()
        with pytest.raises(TypeError) as caught:
            DistributedSampler(dataset)  # type: ignore[arg-type]
        return str(caught.value)

    assert all("must have a length, and object has none" in text for text in run_ranks(2, program))


def test_contradictions_are_refused() -> None:
    with pytest.raises(ValueError, match="num_replicas and rank together"):
        DistributedSampler(range(3), num_replicas=2)
    with pytest.raises(ValueError, match="drop_last=True is uneven='drop'"):
        DistributedSampler(range(3), drop_last=True, uneven="keep")


def test_torchs_loader_takes_it() -> None:
    def program(rank: int) -> list[list[int]]:
        data = torch.arange(5)
        sampler = DistributedSampler(data, shuffle=False, uneven="keep")
        loader: DataLoader[int] = DataLoader(data, batch_size=2, sampler=sampler)  # type: ignore[arg-type]
        return [batch.tolist() for batch in loader]

    assert run_ranks(2, program) == [[[0, 2], [4]], [[1, 3]]]


def test_resuming_past_the_end_is_refused() -> None:
    with pytest.raises(ValueError, match=r"after 4 rows .* has 3"):
        DistributedSampler(range(3)).load_state_dict({"epoch": 0, "taken": 4})


@pytest.mark.parametrize("ranks", [2, 3])
def test_going_on_from_a_state_takes_each_row_once(ranks: int) -> None:
    samplers = [DistributedSampler(range(12), 2, rank, seed=1) for rank in range(2)]
    for sampler in samplers:
        sampler.set_epoch(3)
    first = [row for sampler in samplers for row in islice(sampler, 2)]
    (state,) = {tuple(sampler.state_dict().items()) for sampler in samplers}
    rest = []
    for rank in range(ranks):
        sampler = DistributedSampler(range(12), ranks, rank, seed=1, uneven="keep")
        sampler.load_state_dict(dict(state))
        sampler.set_epoch(3)
        rest += list(sampler)
    assert len(first) == 4
    assert sorted(first + rest) == list(range(12))


def test_an_iterator_that_takes_no_row_leaves_the_place() -> None:
    """torch's loader of rows without batches makes one, if it has workers."""
    sampler = DistributedSampler(range(6), 1, 0, shuffle=False)
    sampler.load_state_dict({"epoch": 0, "taken": 4})
    iter(sampler)
    assert list(sampler) == [4, 5]


def test_the_next_epoch_begins_at_its_start() -> None:
    sampler = DistributedSampler(range(6), 1, 0)
    sampler.load_state_dict({"epoch": 2, "taken": 4})
    sampler.set_epoch(3)
    assert sampler.state_dict() == {"epoch": 3, "taken": 0}
    assert len(list(sampler)) == 6
