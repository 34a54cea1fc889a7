"""Blocks of attention: which keys a query attends to, and the arithmetic of a block.

Blocks are joined by the logarithm of the sum of their weights, as in FlashAttention (Dao 2022).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

#: Start and end of global indices.
Range = tuple[int, int]
Ranges = tuple[Range, ...]
#: The most queries of a block that needs a mask.
_MASKED_QUERIES = 128


class BlockPlace(NamedTuple):
    """A block of queries and keys in local indices; ``first`` are the global ones of its start."""

    queries: slice
    keys: slice
    causal: bool
    masked: bool
    first: tuple[int, int]


@dataclass(frozen=True)
class KeyPattern:
    """The keys of each query, by global index: key j for query i if i - left <= j <= i + right.

    Args:
        left: None: no bound.
        right: None: no bound; 0: causal.
        documents: Where documents begin and end, ascending: queries attend to keys of their own
            document. (): all is one document.
    """

    left: int | None = None
    right: int | None = None
    documents: tuple[int, ...] = ()

    @classmethod
    def of(cls, left: int, right: int, documents: tuple[int, ...]) -> KeyPattern:
        """The pattern of a window as ``varlen_attn`` takes it: -1 for no bound."""
        return cls(None if left < 0 else left, None if right < 0 else right, documents)

    def needed(self, queries: Ranges, length: int) -> Ranges:
        """The ranges of ``length`` keys that the queries attend to, ascending and disjoint."""
        reached = [
            self._reach(*each)[1] for part in queries for each in self._by_document(part, length)
        ]
        merged: list[Range] = []
        for start, end in sorted(each for each in reached if each[0] < each[1]):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
            else:
                merged.append((start, end))
        return tuple(merged)

    def pieces(self, queries: Ranges, keys: Ranges) -> Iterator[BlockPlace]:
        """The blocks in which local queries attend to local keys."""
        for part, place in zip(queries, _starts(queries), strict=True):
            for other, at in zip(keys, _starts(keys), strict=True):
                for (a, b), (c, d), causal, masked in self._blocks(part, other):
                    mine = slice(a - part[0] + place, b - part[0] + place)
                    theirs = slice(c - other[0] + at, d - other[0] + at)
                    yield BlockPlace(mine, theirs, causal, masked, (a, c))

    def allowed(self, queries: Range, keys: Range) -> Tensor:
        """True for each pair of a query and a key that it attends to; documents aside."""
        ahead = torch.arange(*keys) - torch.arange(*queries).unsqueeze(-1)
        result = torch.ones_like(ahead, dtype=torch.bool)
        if self.left is not None:
            result &= ahead >= -self.left
        return result if self.right is None else result & (ahead <= self.right)

    def _by_document(self, queries: Range, length: int) -> Iterator[tuple[Range, Range]]:
        for start, end in pairwise(self.documents or (0, max(length, queries[1]))):
            yield (max(start, queries[0]), min(end, queries[1])), (start, min(end, length))

    def _reach(self, queries: Range, keys: Range) -> tuple[Range, Range]:
        """The queries and keys without those that have no partner; empty ranges if none has."""
        (a, b), (c, d) = queries, keys
        if a >= b:
            return (a, a), (c, c)
        if self.right is not None:
            d = min(d, b + self.right)
        if self.left is not None:
            c = max(c, a - self.left)
        if self.right is not None:
            a = max(a, c - self.right)
        if self.left is not None:
            b = min(b, d + self.left)
        return ((a, b), (c, d)) if a < b and c < d else ((a, a), (c, c))

    def _blocks(self, queries: Range, keys: Range) -> Iterator[tuple[Range, Range, bool, bool]]:
        for mine, whole in self._by_document(queries, keys[1]):
            theirs = max(whole[0], keys[0]), min(whole[1], keys[1])
            yield from self._split(*self._reach(mine, theirs))

    def _split(self, queries: Range, keys: Range) -> Iterator[tuple[Range, Range, bool, bool]]:
        """Blocks that need no mask, a causal mask, or another mask."""
        (a, b), (c, d) = queries, keys
        if a >= b or c >= d:
            return
        if (self.left is None or c >= b - 1 - self.left) and (
            self.right is None or d - 1 <= a + self.right
        ):
            yield queries, keys, False, False
        elif self.left is None and self.right == 0:
            if c < a:
                yield queries, (c, a), False, False
            yield queries, (a, d), True, False
        elif b - a > _MASKED_QUERIES:
            for start in range(a, b, _MASKED_QUERIES):
                part = start, min(b, start + _MASKED_QUERIES)
                yield from self._split(*self._reach(part, keys))
        else:
            yield queries, keys, False, True


def _starts(ranges: Ranges) -> list[int]:
    """The local index at which each range begins."""
    starts = [0]
    for start, end in ranges:
        starts.append(starts[-1] + end - start)
    return starts[:-1]


def overlaps(held: Ranges, needed: Ranges) -> Ranges:
    """The parts of ``held`` that are needed, in the order of ``held``."""
    both = [(max(a, c), min(b, d)) for a, b in held for c, d in needed]
    return tuple([each for each in both if each[0] < each[1]])


def count(ranges: Iterable[Range]) -> int:
    """The number of indices in ranges."""
    return sum(end - start for start, end in ranges)


def local_slices(held: Ranges, ranges: Ranges) -> list[slice]:
    """The slices of the local tensor in which parts of ``held`` lie."""
    found = []
    for start, end in ranges:
        at, whole = next(
            (place, each)
            for place, each in zip(_starts(held), held, strict=True)
            if each[0] <= start and end <= each[1]
        )
        found.append(slice(start - whole[0] + at, end - whole[0] + at))
    return found


# -- arithmetic ------------------------------------------------------------------------------

#: torch's number of the kernel that makes no matrix of weights.
FLASH = 1
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


#: The dtypes of 16 bits.
NARROW = (torch.bfloat16, torch.float16)


def wide(x: Tensor) -> Tensor:
    """The tensor, in float32 if it has 16 bits: joined parts would be worse than torch's."""
    return x.float() if x.dtype in NARROW else x


@dataclass(frozen=True)
class Block:
    """A block of queries and keys: of shape (batch, heads, length, depth), with as many heads.

    If ``causal`` query i attends to keys 0 to i of the block only. ``mask`` is added to scores,
    ``kept`` multiplies weights. ``flash``: torch's kernel serves; else a matrix of weights is made,
    and ``shift`` taken from the masked scores of each query.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool
    mask: Tensor | None
    kept: Tensor | None
    scale: float
    flash: bool
    shift: Tensor | None = None

    def forward(self) -> tuple[Tensor, Tensor]:
        """The result, and the logarithm of the sum of weights of each query."""
        if self.flash and self.kept is None:
            made: tuple[Tensor, Tensor] = _flash(
                *(self.query, self.key, self.value, 0.0, self.causal),
                attn_mask=self.mask,
                scale=self.scale,
            )
            if self.mask is None:
                return made
            nothing = (self.mask == -math.inf).all(-1)  # for which the kernel says 0
            return made[0], made[1].masked_fill(nothing, -math.inf)
        scores = self._scores()
        logs = scores.logsumexp(-1)
        weights = _weights(scores, logs)
        return (weights if self.kept is None else weights * self.kept) @ self.value, logs

    def backward(self, grad: Tensor, out: Tensor, logs: Tensor) -> Sequence[Tensor]:
        """The gradients of query, key and value, from the joined result and logarithms."""
        if self.flash and self.kept is None:
            made: Sequence[Tensor] = _flash_backward(
                *(grad, self.query, self.key, self.value, out, logs, 0.0, self.causal),
                attn_mask=self.mask,
                scale=self.scale,
            )
            return made
        weights = _weights(self._scores(), logs)
        kept = weights if self.kept is None else weights * self.kept
        of_weights = grad @ self.value.mT
        if self.kept is not None:
            of_weights = of_weights * self.kept
        of_scores = weights * (of_weights - (grad * out).sum(-1, keepdim=True)) * self.scale
        return of_scores @ self.key, of_scores.mT @ self.query, kept.mT @ grad

    def _scores(self) -> Tensor:
        scores = self.query @ self.key.mT * self.scale
        if self.causal:
            later = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        scores = scores if self.mask is None else scores + self.mask
        return scores if self.shift is None else scores - self.shift


def _weights(scores: Tensor, logs: Tensor) -> Tensor:
    """The weights, which add up to 1 over all blocks; 0 for queries that attend to nothing."""
    return (scores - finite(logs).unsqueeze(-1)).exp()


def finite(logs: Tensor) -> Tensor:
    """The logarithms, with 0 for queries that attend to nothing."""
    return logs.masked_fill(logs == -math.inf, 0)


def join(out: Tensor, logs: Tensor, blocks: Iterable[tuple[slice, Block]]) -> None:
    """Add blocks, each of some queries, to a result and logarithms that were computed so far."""
    for rows, block in blocks:
        more, theirs = block.forward()
        mine = logs[..., rows]
        joined = torch.logaddexp(mine, theirs)
        at = finite(joined)
        part = out[..., rows, :]
        part.mul_((mine - at).exp().unsqueeze(-1))
        part.add_(more.mul_((theirs - at).exp().unsqueeze(-1)))
        mine.copy_(joined)
