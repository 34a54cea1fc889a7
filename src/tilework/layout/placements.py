"""Placements: what each axis of a mesh of ranks does to a tensor, as values."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tilework.layout.box import Cut, Ints, chunk_at, whole_number, whole_numbers

_OURS = (
    "a tilework placement: torch.distributed's functions need the placements of "
    "torch.distributed.tensor. x.to_torch() converts a DTensor, with the placements"
)
_DIM = "Shard takes a dim, a whole number such as 0 or -1"
_SIZES = "Shard takes sizes, a whole number for each rank along the axis, as (3, 5)"
_TURNS = "Shard takes turns, a whole number such as 2"
_ORDER = "order has the number of each axis of the mesh once, as (1, 0)"
_REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")


class _PlacementKind:
    __slots__ = ()

    def __str__(self) -> str:
        refuse_torch_caller(self, _OURS)
        return repr(self)

    def is_shard(self, dim: int | None = None) -> bool:
        """True if the placement is a Shard; if ``dim`` is given, only for a Shard of this dim."""
        refuse_torch_caller(self, _OURS)
        return isinstance(self, Shard) and dim in (None, self.dim)

    def is_replicate(self) -> bool:
        """True if all ranks along the axis hold the same values."""
        refuse_torch_caller(self, _OURS)
        return isinstance(self, Replicate)

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """True if the placement is Partial (with ``reduce_op``, if given)."""
        refuse_torch_caller(self, _OURS)
        return isinstance(self, Partial) and reduce_op in (None, self.reduce_op)


@dataclass(frozen=True, slots=True, repr=False)
class Shard(_PlacementKind):
    """A mesh axis splits ``dim`` into as many shards as the axis is long.

    Args:
        dim: The tensor dim; negative numbers count from the last.
        sizes: The size of each shard; None: as ``torch.chunk`` splits.
        turns: The number of blocks of each shard. With 2 or more, ``dim`` is split into ``turns``
            times as many blocks as there are ranks, as ``torch.chunk`` splits, and the blocks are
            dealt to the ranks forth and back: of p ranks, rank r has blocks r and 2p-1-r with
            ``turns=2``. They follow each other in the local tensor. Ranks then have equally much to
            do where work grows along the dim, as in causal attention.

    Raises:
        ValueError: ``sizes`` is empty or has a negative number, ``turns`` is below 1, or both are
            given.
        TypeError: ``dim``, ``turns`` or an item of ``sizes`` is not an integer.
    """

    dim: int
    sizes: Ints | None = None
    turns: int = 1

    def __post_init__(self) -> None:
        if self.dim.__class__ is not int:
            object.__setattr__(self, "dim", whole_number(self.dim, _DIM))
        if self.sizes is not None:
            sizes = whole_numbers(self.sizes, _SIZES)
            if not sizes or min(sizes) < 0:
                raise ValueError(f"Shard takes one or more sizes, none negative, got {sizes}")
            object.__setattr__(self, "sizes", sizes)
        if self.turns != 1 or self.turns.__class__ is not int:
            object.__setattr__(self, "turns", whole_number(self.turns, _TURNS))
            if self.turns < 1 or self.sizes is not None:
                raise ValueError(
                    f"Shard takes sizes, or turns of 1 or more that deal equal blocks; got "
                    f"sizes={self.sizes}, turns={self.turns}"
                )

    @property
    def cut(self) -> Cut:
        """The way to split the dim: the sizes, the number of turns, or None as by default."""
        return self.sizes if self.turns == 1 else self.turns

    @staticmethod
    def local_shard_size_and_offset(
        curr_local_size: int, num_chunks: int, rank: int
    ) -> tuple[int, int]:
        """The size and the offset of a shard of a dim split as by ``torch.chunk``."""
        offset, size = chunk_at(curr_local_size, num_chunks, rank)
        return size, offset

    def __repr__(self) -> str:
        sizes = "" if self.sizes is None else f", sizes={self.sizes}"
        turns = "" if self.turns == 1 else f", turns={self.turns}"
        return f"Shard(dim={self.dim}{sizes}{turns})"


def shard_of(dim: int, cut: Cut) -> Shard:
    """The placement that splits a dim in this way."""
    return Shard(dim, turns=cut) if isinstance(cut, int) else Shard(dim, cut)


@dataclass(frozen=True, slots=True)
class Replicate(_PlacementKind):
    """All ranks along a mesh axis hold the same values."""


@dataclass(frozen=True, slots=True)
class Partial(_PlacementKind):
    """The value is the reduction of the tensors that the ranks along a mesh axis hold.

    Args:
        reduce_op: The reduction, by name: "sum", "avg", "product", "min", "max", "band", "bor" or
            "bxor". ("premul_sum" is accepted, but a tensor cannot be redistributed to it.)

    Raises:
        ValueError: There is no such reduction.
    """

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in _REDUCTIONS:
            raise ValueError(
                f"Partial takes the name of a reduction, one of {', '.join(_REDUCTIONS)}; got "
                f"{self.reduce_op!r}"
            )


Placement = Shard | Replicate | Partial
_KINDS = frozenset({Shard, Replicate, Partial})


def placements_in(placements: Any) -> tuple[Any, ...]:
    """The placements for each axis of a mesh that a function was given; no single placement."""
    if not isinstance(placements, (tuple, list)):
        _check_several(placements)
    found = tuple(placements)
    if not _KINDS.issuperset(map(type, found)):
        for each in found:
            if type(each).__hash__ is None:  # a nested list, for example
                raise TypeError(
                    f"a placement is Shard(dim), Replicate() or Partial(), got {each!r} in "
                    f"{placements!r}: pass one for each axis of the mesh, as [Shard(0)]"
                )
    return found


def _check_several(placements: Any) -> None:
    """Raise TypeError for a single placement, and for objects that have none."""
    is_of_torch = type(placements).__module__.startswith("torch.distributed")
    if is_of_torch or isinstance(placements, _PlacementKind):
        raise TypeError(
            f"placements are a list with one for each axis of the mesh: pass [{placements!r}], not "
            f"{placements!r}"
        )
    if isinstance(placements, str) or not isinstance(placements, Iterable):
        raise TypeError(
            f"placements are a list with one for each axis of the mesh, as [Shard(0)]; got "
            f"{placements!r}"
        )


def order_in(order: Any) -> Ints:
    """The axes that a function was given, in the order in which they shard."""
    return whole_numbers(order, _ORDER)


def native_placement(placement: Any) -> Any:
    """This library's placement for a torch placement; anything else is returned unchanged."""
    kind = type(placement)
    if isinstance(placement, _PlacementKind) or not kind.__module__.startswith("torch.distributed"):
        return placement
    if kind.__name__ == "Shard":
        return Shard(placement.dim)
    if kind.__name__ == "Replicate":
        return Replicate()
    if kind.__name__ == "Partial":
        return Partial(placement.reduce_op)
    takes = "; DTensor.from_torch() converts a tensor with this placement"
    raise TypeError(
        f"{placement!r} is a placement of torch.distributed.tensor that tilework has no equivalent "
        f"of: use Shard, Replicate or Partial, with order= where several axes shard a dim"
        f"{takes * (kind.__name__ == '_StridedShard')}"
    )


@dataclass(frozen=True, slots=True)
class Layout:
    """The placement of each axis of a mesh, and the order in which axes shard."""

    placements: tuple[Placement, ...]
    order: Ints | None = None
    """The axes, outermost first, for dims that several of them shard; None: from the first axis to
    the last."""


def check_placements(
    lengths: Sequence[int], placements: Sequence[Placement], order: Sequence[int] | None
) -> None:
    """Raise unless placements and order fit a mesh with axes of these lengths."""
    for placement in placements:
        if not isinstance(placement, _PlacementKind):
            raise TypeError(
                f"a placement is Shard(dim), Replicate() or Partial(), got {placement!r}"
            )
    if len(placements) != len(lengths):
        raise ValueError(
            f"placements and the mesh's axes must have the same length: a mesh of shape "
            f"{tuple(lengths)} takes {len(lengths)}, got {list(placements)}"
        )
    ops = {placement.reduce_op for placement in placements if isinstance(placement, Partial)}
    if len(ops) > 1:
        raise ValueError(f"all Partial placements must have one reduction, got {sorted(ops)}")
    if order is not None and sorted(order_in(order)) != list(range(len(lengths))):
        raise ValueError(
            f"order must name each of the mesh's {len(lengths)} axes once, got {list(order)}"
        )


#: torch asks its arguments for attributes before it uses them; refused objects raise then.
_CALLERS = ("torch.distributed", "torch.nn.parallel")


def refuse_torch_caller(what: object, instead: str) -> None:
    """Raise TypeError, which ends with ``instead``, if torch.distributed calls the method."""
    if called_by_torch(2):
        raise TypeError(f"{what!r} is {instead}")


def called_by_torch(depth: int = 1) -> bool:
    """True if code of torch.distributed called the caller of this (1), or that caller's (2)."""
    caller: str = sys._getframe(depth + 1).f_globals.get("__name__", "")
    return caller.startswith(_CALLERS)
