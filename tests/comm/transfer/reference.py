"""Random tilings, and what a plan must make of tensors laid out in them, computed in one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from hypothesis import strategies as st
from torch import Tensor

from tilework.comm.reduce_op import RedOpType, identity_element
from tilework.layout import Box, Tile, Tiling
from tilework.testing.groups.values import pattern

MOVED = [
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.uint32,
    torch.complex64,
    torch.complex128,
]
REDUCED = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.uint16]
_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


@dataclass(frozen=True)
class Case:
    """A transfer on ranks 0 … n - 1."""

    n: int
    source: Tiling
    target: Tiling
    dtype: torch.dtype
    buffer_bytes: int
    strided: bool

    def value_of(self, term: int) -> Tensor:
        """One term of the source's value, whole."""
        return numbers(term, self.source.shape, self.dtype)

    def tiles(self, rank: int) -> list[Tensor]:
        """What a rank brings."""
        return [
            laid_out(self.value_of(self.source.term_of(i))[self.source.tiles[i].box.slices], self)
            for i in self.source.of(rank)
        ]

    def room(self, rank: int) -> list[Tensor]:
        """Tensors for what it gets, full of something else."""
        boxes = self.target.boxes_of(rank)
        return [laid_out(numbers(77, box.sizes, self.dtype), self) for box in boxes]

    def expected(self, rank: int) -> list[Tensor]:
        """What it must get."""
        return [
            self._target_term(self.target.term_of(i))[self.target.tiles[i].box.slices]
            for i in self.target.of(rank)
        ]

    def _target_term(self, term: int) -> Tensor:
        terms = [self.value_of(number) for number in range(len(self.source.terms))]
        same = self.target.reduce_op == self.source.reduce_op and len(terms) == len(
            self.target.terms
        )
        if same:
            return terms[term]
        if term > 0:
            number = identity_element(RedOpType(self.target.reduce_op), self.dtype)
            return torch.full(self.source.shape, number, dtype=self.dtype)
        return reduced(terms, self.source.reduce_op)


def reduced(terms: Sequence[Tensor], op: str | None) -> Tensor:
    """All terms combined, in float64 where they are floats: the numbers are small and whole."""
    if op is None:
        return terms[0]
    dtype = terms[0].dtype
    wide = torch.float64 if dtype.is_floating_point else torch.int64
    return reduce(_COMBINE[op], [term.to(wide) for term in terms]).to(dtype)


def numbers(seed: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Small whole numbers of any dtype."""
    if dtype is torch.float8_e4m3fn:
        return pattern(seed, shape, torch.float32).to(dtype)
    return pattern(seed, shape, dtype)


def laid_out(tensor: Tensor, case: Case) -> Tensor:
    """The same values; with ``case.strided`` as columns of something wider."""
    if not case.strided or tensor.dim() == 0:
        return tensor.clone()
    shape = (*tensor.shape[:-1], tensor.shape[-1] + 2)
    wide = torch.zeros(shape, dtype=tensor.dtype)
    wide[..., 1:-1] = tensor
    return wide[..., 1:-1]


def same(a: Tensor, b: Tensor) -> bool:
    """Whether both have the same bits."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return (
        a.contiguous().view(-1).view(torch.uint8).equal(b.contiguous().view(-1).view(torch.uint8))
    )


# -- drawing them --------------------------------------------------------------------------


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that cover a shape, from a few cuts; in any order, some of them empty."""
    found = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        i = draw(st.integers(0, len(found) - 1))
        dim = draw(st.integers(0, len(shape) - 1))
        box = found[i]
        at = draw(st.integers(0, box.sizes[dim]))
        rest = list(box.offsets)
        rest[dim] += at
        sizes = [*box.sizes], [*box.sizes]
        sizes[0][dim], sizes[1][dim] = at, box.sizes[dim] - at
        found[i : i + 1] = [Box(box.offsets, tuple(sizes[0])), Box(tuple(rest), tuple(sizes[1]))]
    return draw(st.permutations(found))


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...], n: int, ops: Sequence[str]) -> Tiling:
    """Any tiling on some of ``n`` ranks: replicas, several tiles a rank or none, several terms."""
    count = draw(st.integers(1, 3)) if ops else 1
    owners = st.lists(st.integers(0, n - 1), min_size=1, max_size=n, unique=True)
    terms = [
        tuple([Tile(box, tuple(draw(owners))) for box in draw(boxes(shape))]) for _ in range(count)
    ]
    return Tiling(shape, tuple(terms), draw(st.sampled_from(ops)) if count > 1 else None)


@st.composite
def cases(draw: st.DrawFn, max_ranks: int = 4) -> Case:
    """Any transfer, small."""
    n = draw(st.integers(1, max_ranks))
    shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
    partial = draw(st.booleans())
    ops = sorted(_COMBINE) if partial else []
    dtypes = REDUCED if partial else MOVED
    return Case(
        n,
        draw(tilings(shape, n, ops)),
        draw(tilings(shape, n, ops)),
        draw(st.sampled_from(dtypes)),
        draw(st.sampled_from([1, 100, 300, 1000, 1 << 20])),
        draw(st.booleans()),
    )
