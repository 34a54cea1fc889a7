"""The loader: batches of one process whatever the ranks, and loops that go on where they were."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from tests.hypothesis_settings import examples
from tests.tables import each
from tilework.data import DataLoader
from tilework.mesh import init_device_mesh
from tilework.testing import run_ranks


class Stream(IterableDataset[int]):
    """Numbers, without a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class Draws(torch.utils.data.Dataset[int]):
    """Random numbers of the worker that is asked."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return int(torch.randint(1 << 40, ()))


def steps(ranks: int, epochs: int = 1, **options: Any) -> list[list[int]]:
    """The rows of each step of all ranks together."""

    def program(rank: int) -> list[list[int]]:
        loader: DataLoader[int] = DataLoader(range(17), shuffle=True, seed=4, **options)  # type: ignore[arg-type]
        return [batch.tolist() for _ in range(epochs) for batch in loader]

    by_rank = run_ranks(ranks, program)
    longest = max(map(len, by_rank))
    rows = ([row for batches in by_rank for row in batches[at : at + 1]] for at in range(longest))
    return [sorted(row for batch in step for row in batch) for step in rows]


@each("ranks", [2, 3, 4])
def test_steps_have_the_rows_of_one_process(ranks: int) -> None:
    options: dict[str, Any] = {"global_batch_size": 12, "uneven": "keep", "epochs": 2}
    assert steps(ranks, **options) == steps(1, **options)


def test_epochs_have_orders_of_their_own() -> None:
    batches = steps(2, epochs=2, batch_size=2, uneven="drop")
    assert batches[:4] != batches[4:]


@examples(20)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 9), st.booleans())
def test_a_loop_goes_on_with_other_ranks(before: int, after: int, stop: int, shuffle: bool) -> None:
    def start(rank: int) -> tuple[list[int], dict[str, int]]:
        loader = make()
        seen: list[int] = []
        for at, batch in enumerate(loader):
            seen += batch.tolist()
            if at == stop:
                break
        return seen, loader.state_dict()

    def make() -> DataLoader[int]:
        return DataLoader(range(23), batch_size=2, shuffle=shuffle, uneven="keep")  # type: ignore[arg-type]

    first = run_ranks(before, start)
    state = first[0][1]

    def go_on(rank: int) -> tuple[list[int], int]:
        loader = make()
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        return [row for batch in loader for row in batch.tolist()], loader.epoch

    rest = run_ranks(after, go_on)
    rows = [row for seen, _ in first for row in seen] + [row for seen, _ in rest for row in seen]
    if state["epoch"] == 0:
        assert sorted(rows) == list(range(23))
        assert {epoch for _, epoch in rest} == {1}
    else:
        assert state == {"epoch": 1, "rows_taken": 0, "seed": 0}


@each("choose", [lambda loader: loader, lambda loader: loader.sampler])
def test_an_epoch_is_chosen_by_the_loader_or_its_sampler(choose: Any) -> None:
    """As by loops written for torch, which choose a resumed epoch again."""

    def batches(epoch: int, state: dict[str, int] | None = None) -> list[list[int]]:
        loader: DataLoader[int] = DataLoader(range(8), batch_size=2, shuffle=True)  # type: ignore[arg-type]
        if state is not None:
            loader.load_state_dict(state)
        choose(loader).set_epoch(epoch)
        return [batch.tolist() for batch in loader]

    assert batches(5) != batches(0)
    state = {"epoch": 5, "rows_taken": 4, "seed": 0}
    assert batches(5, state) == batches(5)[2:]
    assert batches(0, state) == batches(0)


def test_a_loop_that_was_left_begins_its_epoch_again() -> None:
    loader: DataLoader[int] = DataLoader(range(6), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    next(iter(loader))
    first = [batch.tolist() for batch in loader]
    assert sorted(row for batch in first for row in batch) == list(range(6))
    assert loader.epoch == 1


@each("shuffle", [False, True])
def test_rows_are_chosen_on_the_cpu(shuffle: bool) -> None:
    """Whatever the default device, as "cuda" by ``torch.set_default_device``."""
    loader: DataLoader[int] = DataLoader(range(4), 2, shuffle, collate_fn=list)  # type: ignore[arg-type]
    loader.set_epoch(1)
    expected = list(loader)
    loader.set_epoch(1)
    with torch.device("meta"):
        assert list(loader) == expected


def test_an_axis_of_a_mesh_divides() -> None:
    def program(rank: int) -> list[list[int]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        loader: DataLoader[int] = DataLoader(range(8), batch_size=2, mesh=mesh["dp"])  # type: ignore[arg-type]
        return [batch.tolist() for batch in loader]

    even, odd = [[0, 2], [4, 6]], [[1, 3], [5, 7]]
    assert run_ranks(4, program) == [even, even, odd, odd]


@each(
    ("uneven", "rows"),
    [("pad", [[0, 2, 4], [1, 3, 0]]), ("drop", [[0, 2], [1, 3]]), ("keep", [[0, 2, 4], [1, 3]])],
)
def test_streams_are_divided(uneven: Any, rows: list[list[int]]) -> None:
    def program(rank: int) -> list[int]:
        loader = DataLoader(Stream(5), batch_size=2, uneven=uneven)
        return [row for batch in loader for row in batch.tolist()]

    assert run_ranks(2, program) == rows


def test_rows_that_are_batches_stay_as_they_are() -> None:
    """By ``batch_size=None``, as in torch."""

    def program(rank: int) -> list[Any]:
        rows = [torch.tensor([number, number]) for number in range(3)]
        loaders = [DataLoader(Stream(3), None), DataLoader(rows, None)]  # type: ignore[arg-type]
        loader: DataLoader[Any]
        for loader in loaders:
            loader.load_state_dict({"epoch": 0, "rows_taken": 2, "seed": 0})
        stream, listed = map(list, loaders)
        return [stream, listed[0].tolist()]

    assert run_ranks(2, program) == [[[2], [2, 2]], [[0], [0, 0]]]


def test_a_stream_with_a_length_gives_the_number_of_batches() -> None:
    class Counted(Stream):
        def __len__(self) -> int:
            return self.length

    def program(rank: int) -> list[int]:
        uneven: list[Any] = ["pad", "drop", "keep"]
        loaders = [DataLoader(Counted(9), batch_size=2, uneven=each) for each in uneven]
        assert [len(loader) for loader in loaders] == [len(list(loader)) for loader in loaders]
        with pytest.raises(TypeError, match="'Stream' has no len"):
            len(DataLoader(Stream(9), batch_size=2))
        return [len(loader) for loader in loaders]

    assert run_ranks(2, program) == [[3, 2, 3], [3, 2, 2]]


def test_workers_divide_a_stream_by_its_attributes() -> None:
    """As in the documentation of torch's IterableDataset; also where workers unpickle it."""

    def halve(worker: int) -> None:
        info: Any = torch.utils.data.get_worker_info()
        info.dataset.length //= info.num_workers

    loader = DataLoader(Stream(4), batch_size=2, num_workers=2, worker_init_fn=halve)
    assert [batch.tolist() for batch in loader] == [[0, 1], [0, 1]]
    assert pickle.loads(pickle.dumps(loader.dataset)).length == 4


def test_no_sampler_may_be_given() -> None:
    """As by a program that passes the options of torch's DataLoader on."""
    loader: DataLoader[int] = DataLoader(range(3), 2, sampler=None, batch_sampler=None)  # type: ignore[arg-type]
    assert [batch.tolist() for batch in loader] == [[0, 1], [2]]


def test_a_stream_shorter_than_the_ranks_is_repeated() -> None:
    def program(rank: int) -> list[int]:
        return [row for batch in DataLoader(Stream(2), batch_size=1) for row in batch.tolist()]

    assert run_ranks(5, program) == [[0], [1], [0], [1], [0]]


def test_a_stream_goes_on_where_it_was() -> None:
    def program(rank: int) -> list[list[int]]:
        loader = DataLoader(Stream(9), batch_size=2)
        next(iter(loader))
        again = DataLoader(Stream(9), batch_size=2)
        again.load_state_dict(loader.state_dict())
        other = DataLoader(Stream(9), batch_size=3)
        with pytest.raises(ValueError, match="after 4 rows in steps of 6"):
            other.load_state_dict(loader.state_dict())
        return [batch.tolist() for batch in again]

    assert run_ranks(2, program) == [[[4, 6], [8]], [[5, 7], [0]]]


def test_workers_draw_differently_on_ranks_and_alike_in_runs() -> None:
    """In this process, one rank after the other: forking from threads is not safe."""

    def draws(rank: int, epochs: int) -> list[int]:
        torch.manual_seed(0)
        loader = DataLoader(Draws(), batch_size=2, num_workers=1)
        loader._division = type(loader._division)(rank, 2)
        return [row for _ in range(epochs) for batch in loader for row in batch.tolist()]

    first = draws(0, 2)
    assert first == draws(0, 2)
    assert not set(first) & set(draws(1, 2))
    assert len(set(first)) == 8


@each(
    ("options", "kind", "message"),
    [
        ({"sampler": range(3)}, TypeError, "sampler= cannot be given"),
        ({"batch_size": 0}, ValueError, "batch_size must be a positive whole number, got 0"),
        ({"batch_size": 2, "global_batch_size": 4}, ValueError, "not both"),
        ({"global_batch_size": 5}, ValueError, "among 2 ranks: take 4 or 6"),
        ({"global_batch_size": 1}, ValueError, "among 2 ranks: take 2"),
        ({"uneven": "wrap"}, ValueError, "uneven must be one of"),
    ],
)
def test_wrong_arguments_raise_on_all_ranks(
    options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    def program(rank: int) -> str:
        with pytest.raises(kind) as caught:
            DataLoader(range(4), **options)  # type: ignore[arg-type]
        return str(caught.value)

    assert all(message in text for text in run_ranks(2, program))


def test_ranks_with_other_lengths_all_raise() -> None:
    def program(rank: int) -> str:
        with pytest.raises(ValueError, match="the same rows") as caught:
            DataLoader(range(4 + rank))  # type: ignore[arg-type]
        return str(caught.value)

    assert all("length=4 on rank 0" in text for text in run_ranks(2, program))


def test_a_state_of_another_seed_is_refused() -> None:
    loader: DataLoader[int] = DataLoader(range(4), seed=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="saved with seed=0, and this loader has seed=1"):
        loader.load_state_dict({"epoch": 0, "rows_taken": 0, "seed": 0})
    with pytest.raises(ValueError, match="the dataset has 4"):
        loader.load_state_dict({"epoch": 0, "rows_taken": 5, "seed": 1})
