"""Tilings: which ranks hold which boxes of a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from tilework.layout.box import Box, Ints
from tilework.layout.validation import check_boxes


@dataclass(frozen=True, slots=True)
class Tile:
    """A box of a tensor, and the ranks that hold it, each a whole copy.

    Args:
        box: Which part of the tensor.
        owners: Global ranks, at least one, none twice; the preferred one first.

    Example:
        >>> Tile(Box((0, 0), (5, 10)), (0, 4)).owners
        (0, 4)
    """

    box: Box
    owners: Ints

    def __post_init__(self) -> None:
        owners = tuple(map(int, self.owners))
        if not owners or len(set(owners)) != len(owners):
            raise ValueError(
                f"the tile {self.box} needs one or more different owners, got {owners}"
            )
        object.__setattr__(self, "owners", owners)


@dataclass(frozen=True)
class Tiling:
    """Which ranks hold which boxes of a tensor: the layout of every kind of sharded tensor.

    The tensor's value is the reduction of its terms; each term covers the tensor exactly. There
    is one term unless the value is partial: the sum (say) of what several ranks hold.

    A rank's local tensors are always listed as ``of(rank)`` lists its tiles.

    Args:
        shape: The tensor's global shape.
        terms: The tiles of each term.
        reduce_op: How terms are combined ("sum", "max", …); None for one term.

    Raises:
        ValueError: A term does not cover the shape exactly, or several terms have no
            ``reduce_op``, or one has.

    Example:
        >>> halves = Tiling.of_tiles((4,), [Tile(Box((0,), (2,)), (0,)), Tile(Box((2,), (2,)), (1,))])
        >>> halves.ranks, halves.boxes_of(1)
        ((0, 1), (Box(offsets=(2,), sizes=(2,)),))
    """

    shape: Ints
    terms: tuple[tuple[Tile, ...], ...]
    reduce_op: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(map(int, self.shape)))
        object.__setattr__(self, "terms", tuple(map(tuple, self.terms)))
        if not self.terms or (len(self.terms) > 1) != (self.reduce_op is not None):
            raise ValueError(
                f"a tiling has one term and no reduce_op, or several terms and one, got "
                f"{len(self.terms)} terms and reduce_op={self.reduce_op!r}"
            )
        for term in self.terms:
            check_boxes(self.shape, [tile.box for tile in term])

    @classmethod
    def of_tiles(cls, shape: Sequence[int], tiles: Iterable[Tile]) -> Tiling:
        """A tiling of one term."""
        return cls(tuple(shape), (tuple(tiles),))

    @cached_property
    def tiles(self) -> tuple[Tile, ...]:
        """All tiles of all terms, in order; a tile's index in here names it."""
        return tuple([tile for term in self.terms for tile in term])

    @cached_property
    def ranks(self) -> Ints:
        """The ranks that hold anything, empty tiles too; ascending."""
        return tuple(sorted(self._held))

    def term_of(self, tile: int) -> int:
        """The term that the tile with this index belongs to."""
        for number, term in enumerate(self.terms):
            if tile < len(term):
                return number
            tile -= len(term)
        raise IndexError(f"the tiling has {len(self.tiles)} tiles")

    def of(self, rank: int) -> Ints:
        """The indices of the tiles that ``rank`` holds, ascending."""
        return self._held.get(rank, ())

    def boxes_of(self, rank: int) -> tuple[Box, ...]:
        """The boxes that ``rank`` holds, as :meth:`of` lists them."""
        return tuple([self.tiles[i].box for i in self.of(rank)])

    @cached_property
    def _held(self) -> dict[int, Ints]:
        held: dict[int, list[int]] = {}
        for i, tile in enumerate(self.tiles):
            for owner in tile.owners:
                held.setdefault(owner, []).append(i)
        return {rank: tuple(tiles) for rank, tiles in held.items()}
