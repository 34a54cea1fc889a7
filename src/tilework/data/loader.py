"""The loader of each rank's batches, which can be resumed within an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset

from tilework.comm.world import AnyGroup
from tilework.data.sampler import DistributedSampler, Division, EpochPlace, Uneven, divide
from tilework.mesh import DeviceMesh

T_co = TypeVar("T_co", covariant=True)


class DataLoader(TorchDataLoader[T_co]):
    """torch's DataLoader, in which each rank has batches of a part of the rows.

    Making a loader is collective over the ranks that share the rows, and blocks: the ranks compare
    their arguments. Iterating is local. Each full iteration is an epoch, and ``shuffle`` gives each
    epoch another order. At each step all ranks together have the rows that one process would have
    with a batch of ``global_batch_size`` rows, for any number of ranks. The seed, the epoch and the
    rank seed the random numbers of workers: ranks augment differently, and a run can be repeated.

    :meth:`state_dict` counts the rows that all ranks have taken, and a loader on another number of
    ranks can continue there.

    Args:
        dataset: A dataset with a length, or an iterable dataset. Each rank iterates over the whole
            of an iterable dataset, in each worker, and keeps every n-th row, for n ranks.
        batch_size: The number of rows in a batch of one rank; None: rows come one by one, as they
            are, for datasets whose rows are batches.
        shuffle: Whether each epoch has another order; not for iterable datasets.
        global_batch_size: The number of rows in a step of all ranks together, instead of
            ``batch_size``.
        seed: The seed of the order and of the workers; the same on each rank.
        uneven: What happens if rows do not divide evenly: see :class:`DistributedSampler`. With
            ``"keep"`` ranks may have different numbers of batches: train within ``join()``.
        drop_last: Whether a last batch that is not full is left out.
        group: The ranks that share the rows; None: the default group, or this process alone if
            there is none.
        mesh: The mesh along whose axes rows are divided, instead of a group: ``mesh["dp"]``.
        options: Other options of torch's DataLoader, such as ``num_workers``.

    Raises:
        ValueError: Arguments contradict each other; or, on every rank, ranks were given different
            arguments.
        TypeError: A sampler is given, but the loader makes the sampler itself.

    Example:
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     return [batch.tolist() for batch in DataLoader(range(6), global_batch_size=4)]
        >>> run_ranks(2, program)
        [[[0, 2], [4]], [[1, 3], [5]]]
    """

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool = False,
        *,
        global_batch_size: int | None = None,
        seed: int = 0,
        uneven: Uneven = "pad",
        drop_last: bool = False,
        group: AnyGroup = None,
        mesh: DeviceMesh | None = None,
        **options: Any,
    ) -> None:
        streams = isinstance(dataset, IterableDataset)

        def facts() -> dict[str, Any]:
            _check(streams, shuffle, batch_size, global_batch_size, options)
            return {
                "length": None if streams else len(cast(Any, dataset)),
                "batch_size": batch_size,
                "global_batch_size": global_batch_size,
                "shuffle": bool(shuffle),
                "seed": seed,
                "uneven": uneven,
                "drop_last": bool(drop_last),
            }

        division = divide(uneven, group, mesh, facts)
        rows = _rows_of_a_batch(batch_size, global_batch_size, division.ranks)
        self._division, self._seed = division, seed
        self._seeded = None if options.get("generator") is not None else torch.Generator()
        options = {**options, "generator": self._seeded or options["generator"]}
        sampler = None
        if streams:
            dataset = cast("Dataset[T_co]", _RankRows(cast(Any, dataset), division))
        else:
            sampler = DistributedSampler(
                cast(Any, dataset), division.ranks, division.rank, shuffle, seed, uneven=uneven
            )
        self._own_sampler = sampler
        self._place = EpochPlace() if sampler is None else sampler
        options["sampler"] = sampler
        super().__init__(dataset, rows, drop_last=drop_last, **options)

    @property
    def epoch(self) -> int:
        """The number of the epoch that is being iterated; between epochs, of the next epoch."""
        return self._place.epoch

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch, from the first row on.

        A resumed epoch, if it is chosen again, continues with the rows that are left.
        """
        self._place.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """This rank's batches of one epoch; after :meth:`load_state_dict`, of the epoch's rest."""
        if self._seeded is not None:
            place = (self._seed * 1_000_003 + self.epoch) * 65_537 + self._division.rank
            self._seeded.manual_seed(place % (1 << 63))
        start = self._place.start
        with cast(torch.Generator, self.generator).device:  # whatever the default device
            batches: Iterator[Any] = super().__iter__()
        if self._own_sampler is None:
            batches = islice(batches, self._place.begin() // self._rows_of_a_step, None)
        self._place.taken = start  # the sampler counts rows that workers only load, too
        return self._counted(batches, start)

    def _counted(self, batches: Iterator[Any], start: int) -> Iterator[Any]:
        for number, batch in enumerate(batches, 1):
            taken = start + number * self._rows_of_a_step
            if self._own_sampler is not None:
                taken = min(taken, len(cast(Any, self.dataset)))
            self._place.taken = taken
            yield batch
        self.set_epoch(self.epoch + 1)

    @property
    def _rows_of_a_step(self) -> int:
        return (self.batch_size or 1) * self._division.ranks

    def state_dict(self) -> dict[str, int]:
        """The epoch, and the number of rows that all ranks together have taken in it.

        Local, and equal on ranks that are at the same step. A batch counts once the loop got it.
        """
        return {"epoch": self.epoch, "rows_taken": self._place.taken, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Let the next iteration continue where :meth:`state_dict` was taken. Local.

        An iterable dataset is read again from the start, and the earlier rows are skipped.

        Raises:
            ValueError: The state has another seed, or more rows than the dataset has.
        """
        if state["seed"] != self._seed:
            raise ValueError(
                f"the state was saved with seed={state['seed']}, and this loader has "
                f"seed={self._seed}: it would take rows in another order. "
                f"Make the loader with the saved seed"
            )
        taken = state["rows_taken"]
        if self._own_sampler is not None:
            self._own_sampler.load_state_dict({"epoch": state["epoch"], "taken": taken})
        elif taken % self._rows_of_a_step:
            raise ValueError(
                f"cannot resume an iterable dataset after {taken} rows in steps of "
                f"{self._rows_of_a_step} rows: use the batch size that the state was saved with"
            )
        else:
            self._place.move(state["epoch"], taken)


class _RankRows(IterableDataset[Any]):
    """This rank's rows of an iterable dataset, with that dataset's other attributes."""

    _all_rows: IterableDataset[Any]
    _division: Division

    def __init__(self, dataset: IterableDataset[Any], division: Division) -> None:
        vars(self).update(_all_rows=dataset, _division=division)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # as pickle asks before there is a dataset
            raise AttributeError(name)
        return getattr(self._all_rows, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._all_rows, name, value)

    def __len__(self) -> int:
        return self._division.count(len(cast(Any, self._all_rows)))

    def __iter__(self) -> Iterator[Any]:
        first: list[Any] = []
        division = self._division
        ranks, rank, uneven = division.ranks, division.rank, division.uneven
        rows = iter(self._all_rows)
        while turn := list(islice(rows, ranks)):
            first = first or turn
            if len(turn) < ranks and uneven == "drop":
                return
            if len(turn) < ranks and uneven == "pad":
                turn += (first * ranks)[: ranks - len(turn)]
            yield from turn[rank : rank + 1]


def _check(
    streams: bool,
    shuffle: bool,
    batch_size: int | None,
    global_batch_size: int | None,
    options: Mapping[str, Any],
) -> None:
    """Raise if the arguments of this rank are wrong, whatever other ranks were given."""
    for name in ("sampler", "batch_sampler"):
        if options.get(name) is not None:
            raise TypeError(
                f"{name}= cannot be given: a sampler of the loader chooses each rank's "
                "rows. Give shuffle=, seed= and uneven=, or use torch's DataLoader with "
                "tilework.data.DistributedSampler"
            )
    if streams and shuffle:
        raise ValueError(
            "shuffle must be False for an iterable dataset: shuffle within the dataset"
        )
    for name, value in (("batch_size", batch_size), ("global_batch_size", global_batch_size)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} must be a positive whole number, got {value!r}")
    if batch_size not in (None, 1) and global_batch_size is not None:
        raise ValueError("give batch_size, of each rank, or global_batch_size, of all: not both")


def _rows_of_a_batch(
    batch_size: int | None, global_batch_size: int | None, ranks: int
) -> int | None:
    """The rows in a batch of one rank; None: no batches. Raises if a global batch is uneven."""
    if global_batch_size is None:
        return batch_size
    rows, rest = divmod(global_batch_size, ranks)
    if rest:
        near = f"{rows * ranks} or {(rows + 1) * ranks}" if rows else f"{ranks}"
        raise ValueError(
            f"global_batch_size={global_batch_size} does not divide evenly among {ranks} ranks: "
            f"take {near}"
        )
    return rows
