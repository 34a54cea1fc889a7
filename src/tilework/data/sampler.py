"""The sampler that divides rows among ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.data import Sampler

from tilework.comm.operations.internal import agree_equal
from tilework.comm.world import AnyGroup, NonMember, is_initialized, resolve
from tilework.mesh import DeviceMesh

#: The ranks' rows where their number does not divide evenly: repeat the first ones, leave out the
#: last ones, or let some ranks have a row more than others.
Uneven = Literal["pad", "drop", "keep"]


def epoch_order(length: int, shuffle: bool, seed: int, epoch: int) -> Tensor:
    """The order of an epoch's rows, as of torch's DistributedSampler; the same on every rank."""
    if not shuffle:
        return torch.arange(length, device="cpu")
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(length, generator=generator, device="cpu")


@dataclass(frozen=True)
class Division:
    """A division of rows among ranks: rank r takes every ``ranks``-th row, beginning with row r.

    If each rank takes ``b`` rows at a time, the ranks together take the next ``b * ranks`` rows of
    the order. Their batches together are those of one process, whatever the number of ranks.
    """

    rank: int
    ranks: int
    uneven: Uneven = "pad"

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise ValueError(
                f"rank {self.rank} of {self.ranks}: a rank is at least 0, and less than the number "
                f"of ranks"
            )
        if self.uneven not in get_args(Uneven):
            expected = ", ".join(map(repr, get_args(Uneven)))
            raise ValueError(f"uneven must be one of {expected}, got {self.uneven!r}")

    def count(self, length: int) -> int:
        """The number of rows that this rank gets of ``length`` rows."""
        full, rest = divmod(length, self.ranks)
        if self.uneven == "pad":
            return full + (rest > 0)
        return full if self.uneven == "drop" else full + (self.rank < rest)

    def part(self, order: Tensor, start: int = 0) -> Tensor:
        """This rank's rows of ``order`` after the first ``start`` rows, which ranks have taken."""
        left = order[start:]
        missing = -len(left) % self.ranks
        if self.uneven == "pad" and missing:
            repeats = -(-missing // len(order))
            left = torch.cat([left, order.repeat(repeats)[:missing]])
        elif self.uneven == "drop" and missing:
            left = left[: len(left) - len(left) % self.ranks]
        return left[self.rank :: self.ranks]


_DIFFERENT = "ranks must load the same rows, in the same way:"


class EpochPlace:
    """The epoch, and a place in it, counted in rows of all ranks together."""

    def __init__(self) -> None:
        self.epoch = 0
        #: The place where the next iteration begins.
        self.start = 0
        #: Rows of the epoch that were taken.
        self.taken = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, which decides the order. Call it at the start of each epoch.

        A resumed epoch, if it is chosen again, continues with the rows that are left.
        """
        if epoch != self.epoch:
            self.move(epoch, 0)

    def move(self, epoch: int, taken: int) -> None:
        self.epoch, self.start, self.taken = epoch, taken, taken

    def begin(self) -> int:
        """The place where an iteration begins; the next iteration begins at the first row."""
        start, self.start = self.start, 0
        return start


class DistributedSampler(EpochPlace, Sampler[int]):
    """A sampler of this rank's rows, for a DataLoader: torch's class of that name, with meshes.

    Making a sampler is collective over the ranks that share the rows, and blocks: the ranks compare
    their arguments, since ranks with different lengths or orders would wait for each other later,
    or see rows twice. With ``num_replicas`` and ``rank`` given, making it is local, and nothing is
    compared. Without a process group the sampler yields all rows.

    Args:
        dataset: Anything that has a length, the same on each rank.
        num_replicas: The number of ranks that share the rows; None: those of ``mesh`` or ``group``.
        rank: This rank's number among these ranks. Give both ``rank`` and ``num_replicas``, or
            neither.
        shuffle: Whether each epoch has another order; the order is that of torch's class.
        seed: The seed of the order; the same on each rank.
        drop_last: True means ``uneven="drop"``, as in torch.
        uneven: The treatment of rows that do not divide evenly. ``"pad"`` repeats the first rows,
            so that all ranks have the same number; ``"drop"`` leaves out the last rows; ``"keep"``
            gives some ranks one row more, for evaluation or for training within ``join()``.
        group: The ranks that share the rows; None: the default group.
        mesh: The mesh along whose axes rows are divided, instead of a group; ``mesh["dp"]`` for one
            axis. Ranks at the same place along the axes have the same rows: the ranks of one
            tensor-parallel group, for example.

    Raises:
        ValueError: Arguments contradict each other; or, on every rank, ranks were given different
            arguments.
        TypeError: The dataset has no length.

    Example:
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     return list(DistributedSampler(range(5), shuffle=False, uneven="keep"))
        >>> run_ranks(2, program)
        [[0, 2, 4], [1, 3]]
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        uneven: Uneven | None = None,
        group: AnyGroup = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        self.shuffle, self.seed = bool(shuffle), seed
        rule: Uneven = uneven or ("drop" if drop_last else "pad")

        def facts() -> dict[str, Any]:
            if not hasattr(dataset, "__len__"):
                raise TypeError(
                    f"the dataset must have a length, and {type(dataset).__name__} has none; "
                    "tilework.data.DataLoader takes iterable datasets"
                )
            if drop_last and rule != "drop":
                raise ValueError(f"drop_last=True is uneven='drop', but uneven={rule!r} was given")
            length = len(dataset)
            return {"length": length, "shuffle": self.shuffle, "seed": seed, "uneven": rule}

        if num_replicas is None and rank is None:
            self.division = divide(rule, group, mesh, facts)
        elif num_replicas is None or rank is None or group is not None or mesh is not None:
            raise ValueError(
                "give num_replicas and rank together, or neither of them and a group or a mesh"
            )
        else:
            facts()
            self.division = Division(rank, num_replicas, rule)
        self._length = len(dataset)

    @property
    def num_replicas(self) -> int:
        return self.division.ranks

    @property
    def rank(self) -> int:
        return self.division.rank

    def __len__(self) -> int:
        return self.division.count(self._length)

    def __iter__(self) -> Iterator[int]:
        """This rank's rows of the epoch, in order; once only the rest, after a state was loaded.

        The place is read with the first row, since torch's loaders may make iterators in vain.
        """
        start = self.begin()
        order = epoch_order(self._length, self.shuffle, self.seed, self.epoch)
        for number, row in enumerate(self.division.part(order, start).tolist(), 1):
            self.taken = min(start + number * self.num_replicas, self._length)
            yield row

    def state_dict(self) -> dict[str, int]:
        """The epoch, and the number of rows that all ranks together have taken in it. Local.

        A row counts once the sampler has handed it out. torch's DataLoader with workers asks for
        rows before they are used; :class:`tilework.data.DataLoader` only counts used rows.
        """
        return {"epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a state of :meth:`state_dict`, perhaps of another number of ranks. Local.

        Raises:
            ValueError: The dataset has fewer rows than were taken.
        """
        taken = state["taken"]
        if not 0 <= taken <= self._length:
            raise ValueError(
                f"cannot resume after {taken} rows (of all ranks together): the dataset has "
                f"{self._length}. Use the dataset that the state was saved with"
            )
        self.move(state["epoch"], taken)


def divide(
    uneven: Uneven, group: AnyGroup, mesh: DeviceMesh | None, facts: Callable[[], Mapping[str, Any]]
) -> Division:
    """Divide rows among the ranks of a group or mesh, once all have given equal ``facts``.

    Collective over these ranks; blocks. Without a group and a mesh: all ranks, or this process.
    Raises what ``facts`` raised, and ValueError for both of them, or outside, or unequal facts.
    """
    if group is not None and mesh is not None:
        raise ValueError("give a group or a mesh to divide the rows by, not both")
    if mesh is not None:
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(f"this rank is not in {mesh}, by which the rows are divided")
        position = 0
        for size, at in zip(mesh.shape, coordinate, strict=True):
            position = position * size + at
        agree_equal(facts, mesh.axes_group(range(mesh.ndim)), _DIFFERENT)
        return Division(position, mesh.size(), uneven)
    if group is None and not is_initialized():
        facts()
        return Division(0, 1, uneven)
    pg = resolve(group)
    if isinstance(pg, NonMember):
        raise ValueError(
            "this rank is not in the group by which the rows are divided: make the sampler on "
            "ranks of the group"
        )
    agree_equal(facts, pg, _DIFFERENT)
    return Division(pg.rank(), pg.size(), uneven)
