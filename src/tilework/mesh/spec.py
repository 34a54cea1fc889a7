"""Meshes as values: grids of ranks without groups, for planning, and under every DeviceMesh."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tilework.layout.internal import flat_mesh, whole_numbers

Ints = tuple[int, ...]
_SHAPE = "mesh_shape has the number of ranks along each axis, as (2, 4)"


@dataclass(frozen=True, slots=True)
class MeshSpec:
    """Global ranks in a grid, as a value: equal by content, without groups or communication.

    The ranks need not exist.

    Args:
        ranks: All global ranks in row-major order: the last axis runs fastest.

    Raises:
        ValueError: ``ranks`` or ``names`` do not fit ``shape``, or a rank or a name comes twice.

    Example:
        >>> mesh = MeshSpec.regular((2, 3), ("dp", "tp"))
        >>> mesh.coordinate(4), mesh.line("dp", 4), str(mesh)
        ((1, 1), (1, 4), 'dp=2 tp=3')
    """

    shape: Ints
    ranks: Ints
    names: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", whole_numbers(self.shape, _SHAPE))
        object.__setattr__(self, "ranks", whole_numbers(self.ranks, "a mesh has numbers of ranks"))
        if min(self.shape, default=1) < 1:
            raise ValueError(f"a mesh must have 1 or more ranks along each axis, got {self.shape}")
        if math.prod(self.shape) != len(self.ranks):
            raise ValueError(
                f"a mesh of shape {self.shape} has {math.prod(self.shape)} ranks, got "
                f"{len(self.ranks)}: {list(self.ranks)}"
            )
        if min(self.ranks) < 0:
            raise ValueError(f"ranks must be numbers from 0 on, got {list(self.ranks)}")
        if len(set(self.ranks)) != len(self.ranks):
            twice = sorted({rank for rank in self.ranks if self.ranks.count(rank) > 1})
            raise ValueError(
                f"DeviceMesh cannot have duplicate values: {twice} come more than once in "
                f"{self.nested()}"
            )
        if self.names is not None:
            object.__setattr__(self, "names", _checked_names(self.names, len(self.shape)))

    @classmethod
    def regular(cls, shape: Sequence[int], names: Iterable[str] | None = None) -> MeshSpec:
        """The mesh of ``shape`` with ranks 0, 1, 2, … in row-major order."""
        shape = whole_numbers(shape, _SHAPE)
        ranks = tuple(range(math.prod(shape)))
        return cls(shape, ranks, None if names is None else tuple(names))

    @classmethod
    def of(cls, ranks: Any, names: Iterable[str] | None = None) -> MeshSpec:
        """The mesh of ranks in nested sequences, or in a tensor or array (with ``tolist()``).

        Raises:
            ValueError: The sequences are ragged.
            TypeError: A rank is not an integer.
        """
        nested = ranks.tolist() if hasattr(ranks, "tolist") else ranks
        if isinstance(nested, int):
            nested = [nested]
        shape, flat = flat_mesh(nested)
        return cls(shape, flat, None if names is None else tuple(names))

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def nested(self) -> Any:
        """The ranks as nested lists."""
        rows: list[Any] = list(self.ranks)
        for extent in reversed(self.shape[1:]):
            rows = [rows[i : i + extent] for i in range(0, len(rows), extent)]
        return rows

    def axis(self, which: int | str) -> int:
        """The number of an axis given by number (negative ones count from the last) or name.

        Raises:
            KeyError: There is no axis of that name.
            IndexError: There is no axis of that number.
        """
        if isinstance(which, str):
            if self.names is None or which not in self.names:
                raise KeyError(
                    f"Invalid mesh_dim_name {which!r}: the mesh's axes are "
                    f"{'not named' if self.names is None else ', '.join(self.names)}"
                )
            return self.names.index(which)
        if not -self.ndim <= which < self.ndim:
            raise IndexError(f"axis {which} does not exist in a mesh of {self.ndim} axes: {self}")
        return which % self.ndim

    def coordinate(self, rank: int) -> Ints | None:
        """The index of ``rank`` along each axis; None if the rank is not in the mesh."""
        if rank not in self.ranks:
            return None
        rest, places = self.ranks.index(rank), []
        for extent in reversed(self.shape):
            rest, place = divmod(rest, extent)
            places.append(place)
        return tuple(reversed(places))

    def at(self, coordinate: Sequence[int]) -> int:
        """The rank at a coordinate."""
        index = 0
        for extent, place in zip(self.shape, coordinate, strict=True):
            index = index * extent + place
        return self.ranks[index]

    def line(self, axis: int | str, rank: int) -> Ints:
        """The ranks along an axis through ``rank``, in the axis's order."""
        return self.through([axis], rank).ranks

    def through(self, axes: Sequence[int | str], rank: int) -> MeshSpec:
        """The sub-mesh through ``rank`` along these axes, in this order.

        Raises:
            ValueError: An axis is named twice, or the rank is not in the mesh.
            KeyError: There is no such axis.
        """
        numbers = [self.axis(axis) for axis in axes]
        if len(set(numbers)) != len(numbers):
            raise ValueError(f"each axis can be taken once, got {list(axes)}")
        here = self.coordinate(rank)
        if here is None:
            raise ValueError(f"rank {rank} is not in the mesh of ranks {list(self.ranks)}")
        shape = tuple(self.shape[number] for number in numbers)
        ranks = []
        for places in itertools.product(*map(range, shape)):
            there = list(here)
            for number, place in zip(numbers, places, strict=True):
                there[number] = place
            ranks.append(self.at(there))
        names = self.names and tuple(self.names[number] for number in numbers)
        return MeshSpec(shape, tuple(ranks), names)

    def descending_axis(self) -> int | None:
        """The first axis along which ranks do not ascend everywhere; None if there is none."""
        inner = 1
        found = None
        for axis in reversed(range(self.ndim)):
            extent = self.shape[axis]
            for position, rank in enumerate(self.ranks):
                is_last = position // inner % extent == extent - 1
                if not is_last and self.ranks[position + inner] < rank:
                    found = axis
            inner *= extent
        return found

    def flattened(self, name: str | None = None) -> MeshSpec:
        """A mesh of one axis with the same ranks in the same order.

        Args:
            name: The axis's name; by default all names joined by underscores.
        """
        if name is None and self.names is not None:
            name = "_".join(self.names)
        return MeshSpec((self.size,), self.ranks, None if name is None else (name,))

    def unflattened(
        self, axis: int | str, sizes: Sequence[int], names: Iterable[str] | None
    ) -> tuple[MeshSpec, int]:
        """The mesh with one axis replaced by several, and the number of the first new axis.

        Raises:
            ValueError: The product of the sizes is not the axis's length, or the names do not fit.
            KeyError: There is no axis of that name.
        """
        number = self.axis(axis)
        lengths = whole_numbers(sizes, _SHAPE)
        if math.prod(lengths) != self.shape[number]:
            raise ValueError(
                f"axis {axis!r} has {self.shape[number]} ranks, but the product of the sizes "
                f"{lengths} is {math.prod(lengths)}: both must be equal"
            )
        inner = None if names is None else _checked_names(names, len(lengths))
        if (inner is None) != (self.names is None):
            raise ValueError(
                f"all axes must have names, or none: mesh {self} cannot get axes of names {inner}"
            )
        shape = (*self.shape[:number], *lengths, *self.shape[number + 1 :])
        known = self.names or ()
        all_names = (*known[:number], *(inner or ()), *known[number + 1 :]) or None
        return MeshSpec(shape, self.ranks, all_names), number

    def without(self, lost: Collection[int], axis: int | str = 0) -> MeshSpec:
        """The mesh without each slice across ``axis`` that has a rank of ``lost``.

        A slice is the ranks with the same index along ``axis``. Slices go as a whole, so that the
        other axes keep their lengths.

        Args:
            lost: Global ranks; ranks outside the mesh do not count.

        Raises:
            ValueError: Every slice has a rank of ``lost``.
        """
        which, gone = self.axis(axis), set(lost)
        inner = math.prod(self.shape[which + 1 :])
        extent = self.shape[which]

        def place(position: int) -> int:
            return position // inner % extent

        broken = {place(position) for position, rank in enumerate(self.ranks) if rank in gone}
        if len(broken) == extent:
            raise ValueError(
                f"no slice across axis {axis!r} of the mesh {self} is whole without ranks "
                f"{sorted(gone.intersection(self.ranks))}: name another axis, or make a new mesh"
            )
        ranks = [rank for at, rank in enumerate(self.ranks) if place(at) not in broken]
        shape = (*self.shape[:which], extent - len(broken), *self.shape[which + 1 :])
        return MeshSpec(shape, tuple(ranks), self.names)

    def named(self, names: Iterable[str] | None) -> MeshSpec:
        """The same grid with other names."""
        return replace(self, names=None if names is None else tuple(names))

    def __str__(self) -> str:
        names = self.names or tuple(map(str, range(self.ndim)))
        return " ".join(f"{name}={extent}" for name, extent in zip(names, self.shape, strict=True))


def _checked_names(names: Iterable[str], ndim: int) -> tuple[str, ...]:
    if isinstance(names, str):
        names = (names,)
    names = tuple(names)
    if len(names) != ndim:
        raise ValueError(
            f"mesh_dim_names must name each of the mesh's {ndim} axes, got {list(names)}"
        )
    if len(set(names)) != len(names):
        raise ValueError(f"Each mesh_dim_name must be unique, got {list(names)}")
    if not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"mesh_dim_names must be strings that are not empty, got {list(names)}")
    return names
