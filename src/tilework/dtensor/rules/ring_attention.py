"""Attention where each rank has a part of the sequence: keys come in messages, block by block.

In step s a rank gets the keys that it needs from the rank s places before it, while it computes
with those that came before. Backward gets them again, and sends their gradients back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilework.comm import provenance_digest
from tilework.comm.contract import ProcessGroup
from tilework.comm.per_call.internal import device_kind
from tilework.dtensor.debug import causes
from tilework.dtensor.local_function import LocalFunction
from tilework.dtensor.provenance.digests import Moved, TensorText, moving
from tilework.dtensor.random import philox
from tilework.dtensor.redistribution.redistribute import gradient_of
from tilework.dtensor.rules.attention_blocks import (
    FLASH,
    Block,
    BlockPlace,
    KeyPattern,
    Range,
    Ranges,
    count,
    finite,
    join,
    local_slices,
    overlaps,
    wide,
)
from tilework.dtensor.spec import DTensorSpec, Ints

#: Waits for rows of two tensors, which come from another rank.
Arriving = Callable[[], list[Tensor]]
#: Logarithms up to this one keep their digits behind the point.
_PRECISE = 64


@dataclass(frozen=True)
class Dropout:
    """Dropout of weights by global index, of all of shape ``shape``, from this rank's ``first``."""

    p: float
    key: philox.Key
    shape: Ints
    first: Ints

    def factors(self, query: Tensor, piece: BlockPlace, shape: Ints) -> Tensor:
        """The factor of each weight of a block, of shape (batch, heads, queries, keys)."""
        sizes = *shape, piece.queries.stop - piece.queries.start, piece.keys.stop - piece.keys.start
        kept = philox.Bernoulli(1 - self.p, 1 / (1 - self.p) if self.p < 1 else 0.0)
        drawn = torch.empty(sizes, dtype=query.dtype, device=query.device)
        philox.fill(drawn, self.key, kept, self.shape, (*self.first, *piece.first))
        return drawn.reshape(*query.shape[:2], *sizes[-2:])


@dataclass(frozen=True)
class Holders:
    """The keys that each rank of a group holds and needs, by global index.

    Args:
        me: The rank in the group.
        held: The ranges of each rank, in the order in which they lie in its local tensor.
        needed: The ranges that each rank's queries attend to.
    """

    me: int
    held: tuple[Ranges, ...]
    needed: tuple[Ranges, ...]

    def between(self, source: int, target: int) -> Ranges:
        """The keys that one rank holds and another needs."""
        return overlaps(self.held[source], self.needed[target])

    def sent(self, step: int, rank: int | None = None) -> Ranges:
        """The keys that a rank (this one) sends in a step."""
        rank = self.me if rank is None else rank
        return self.between(rank, (rank + step) % len(self.held))

    def received(self, step: int) -> Ranges:
        """The keys that this rank gets in a step."""
        return self.sent(step, (self.me - step) % len(self.held))

    @cached_property
    def steps(self) -> Ints:
        """The steps in which some rank sends something."""
        ranks = range(len(self.held))
        return tuple([step for step in ranks[1:] if self.most(step)])

    @cached_property
    def busiest(self) -> int:
        """The keys that the busiest rank sends to others, or gets from them."""
        ranks = range(len(self.held))
        moved = [[count(self.between(a, b)) * (a != b) for b in ranks] for a in ranks]
        return max(map(sum, [*moved, *zip(*moved, strict=True)]))

    def most(self, step: int) -> int:
        """The keys that the busiest rank sends in a step."""
        return max(count(self.sent(step, rank)) for rank in range(len(self.held)))


@dataclass(frozen=True)
class AttentionPart:
    """A rank's part of an attention.

    Args:
        holders: Who holds and needs which keys.
        queries: This rank's queries, by global index.
        pattern: The keys of each query.
        scale: The factor of scores.
        group: The ranks that hold the keys; None: this rank holds all that it needs.
        specs: The layouts of query and key, for messages.
        dropout: What is dropped; None: nothing.
        leading: The local shape of the leading dims of the query, for dropout.
        shift: Taken from the masked scores of each query; None: nothing.
    """

    holders: Holders
    queries: Ranges
    pattern: KeyPattern
    scale: float
    group: ProcessGroup | None = None
    specs: tuple[DTensorSpec, DTensorSpec] | None = None
    dropout: Dropout | None = None
    leading: Ints = ()
    shift: Tensor | None = None

    @classmethod
    def alone(cls, queries: Range, keys: int, pattern: KeyPattern, scale: float) -> AttentionPart:
        """The part of a rank that holds the first keys, and needs no others."""
        held = (((0, keys),),)
        return cls(Holders(0, held, held), (queries,), pattern, scale)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The result for local tensors of any number of leading dims. Collective over the group.

        Beside it, the logarithm of each query's sum of weights, which has no gradient. ``mask`` has
        the rows of this rank's queries, for all keys: False where a query does not attend to a key,
        or added to scores.
        """
        query, key, value = self.cast(query, key, value)
        shape, shift = query.shape, None
        if mask is not None:
            if mask.dtype is torch.bool:
                mask = torch.zeros_like(mask, dtype=wide(query[:0]).dtype).masked_fill(
                    ~mask, -math.inf
                )
            mask = wide(mask)
            if (shift := _shift_of(mask)) is not None:
                shift = _four(shift.expand(*shape[:-1], 1))
            mask = _four(mask.expand(*shape[:-1], mask.shape[-1]))
        part = replace(self, leading=tuple(shape[:-2]), shift=shift)
        four = _four(query), _four(key), _four(value)
        out, logs = _Attention.apply(*four, mask, part)
        if causes.watchers:
            causes.tag_gradient(out)
        return out.reshape(*shape[:-1], out.shape[-1]), logs.reshape(shape[:-1])

    @staticmethod
    def cast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors as autocast gives them to torch's attention."""
        device = query.device.type
        if query.is_meta or not torch.is_autocast_enabled(device):
            return query, key, value
        dtype = torch.get_autocast_dtype(device)
        return query.to(dtype), key.to(dtype), value.to(dtype)

    # -- blocks ------------------------------------------------------------------------------

    def blocks(
        self, tensors: Sequence[Tensor], mask: Tensor | None, keys: Ranges
    ) -> Iterator[tuple[BlockPlace, Block]]:
        """The blocks of query, key and value (with the global indices ``keys``)."""
        query, key, value = (wide(x) for x in tensors)
        sharing = query.shape[1] // max(key.shape[1], 1)
        if sharing > 1:
            key, value = (x.repeat_interleave(sharing, 1) for x in (key, value))
        flash = self.dropout is None and self.shift is None and has_kernel(query, key, value)
        for piece in self.pattern.pieces(self.queries, keys):
            q, k, v = query[:, :, piece.queries], key[:, :, piece.keys], value[:, :, piece.keys]
            if 0 in q.shape[:2]:
                continue
            added = mask
            if mask is not None:
                added = mask[:, :, piece.queries, piece.first[1] :][..., : k.shape[2]]
            if piece.masked:
                ends = [at + x.shape[2] for at, x in zip(piece.first, (q, k), strict=True)]
                allowed = self.pattern.allowed(*zip(piece.first, ends, strict=True))
                added = torch.zeros_like(allowed, dtype=q.dtype).masked_fill(~allowed, -math.inf)
                added = added.to(q.device)
            drop = self.dropout
            kept = None if drop is None else drop.factors(query, piece, self.leading)
            shift = None if self.shift is None else self.shift[:, :, piece.queries]
            yield piece, Block(q, k, v, piece.causal, added, kept, self.scale, flash, shift)

    # -- messages ----------------------------------------------------------------------------

    def rounds(self, key: Tensor, value: Tensor) -> Iterator[tuple[int, Ranges, Tensor, Tensor]]:
        """Step, global indices, keys and values: first this rank's own, then those that come."""
        steps = self.holders.steps
        messages = (self.message(step, (key, value)) for step in steps)
        arriving = next(messages, None)
        yield 0, self.holders.held[self.holders.me], key, value
        for step in steps:
            assert arriving is not None
            came, arriving = arriving(), next(messages, None)
            yield step, self.holders.received(step), came[0], came[1]

    def message(self, step: int, pair: Sequence[Tensor], back: bool = False) -> Arriving:
        """Start to send keys and values ``step`` ranks ahead; ``back``: the gradients of others."""
        assert self.group is not None
        assert self.specs is not None
        holders = self.holders
        sent, gets = holders.sent(step), count(holders.received(step))
        rows, arrive = local_slices(holders.held[holders.me], sent), gets
        if back:
            rows, arrive = [slice(0, gets)], count(sent)
        if causes.watchers:
            width = sum(math.prod((*x.shape[:2], x.shape[3])) * x.element_size() for x in pair)
            causes.record_message(self.specs[1], self.group, width * holders.most(step), back)
        me, size, ahead = self.group.rank(), self.group.size(), -step if back else step
        parts = [torch.cat([x[:, :, :0], *[x[:, :, each] for each in rows]], 2) for x in pair]
        leaving = torch.cat([part.reshape(-1) for part in parts])
        shapes = [(*x.shape[:2], arrive, x.shape[3]) for x in pair]
        sizes = list(map(math.prod, shapes))
        came = leaving.new_empty(sum(sizes))
        out, into = [0] * size, [0] * size
        out[(me + ahead) % size], into[(me - ahead) % size] = leaving.numel(), sum(sizes)
        call = "all_to_all_single", leaving, came, None, 0, True
        work = self.group.collective(*call, (out, into))

        def wait() -> list[Tensor]:
            if work is not None:
                work.wait()
            parts = zip(torch.split(came, sizes), shapes, strict=True)
            return [part.view(shape) for part, shape in parts]

        return wait


def _shift_of(mask: Tensor) -> Tensor | None:
    """The maximum of each row of a mask; None if all are so small that sums keep their digits.

    A row may be wholly finfo.min: then the logarithm of a sum of weights would lose the number of
    its keys.
    """
    if 0 in mask.shape or mask.is_meta:
        return None
    top = mask.amax(-1, keepdim=True)
    top = top.masked_fill(~top.isfinite(), 0)
    return top if bool((top.abs() > _PRECISE).any()) else None


def _four(x: Tensor) -> Tensor:
    """The tensor with four dims."""
    if x.dim() > 4:
        return x.flatten(0, x.dim() - 4)
    return x.reshape((1,) * (4 - x.dim()) + tuple(x.shape))


def has_kernel(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool = False) -> bool:
    """True if torch would attend by the kernel that makes no matrix of weights."""
    return bool(
        device_kind(query) == "cpu"
        and key.shape[-1] == value.shape[-1]
        and torch._fused_sdp_choice(query, key, value, enable_gqa=enable_gqa) == FLASH
    )


class _Attention(LocalFunction):
    """Attention of a part, in blocks."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        part: AttentionPart,
    ) -> tuple[Tensor, Tensor]:
        q = wide(query)
        out = q.new_zeros(*query.shape[:3], value.shape[3])
        logs = q.new_full(query.shape[:3], -math.inf)
        for _, keys, k, v in part.rounds(key, value):
            pairs = part.blocks((query, k, v), mask, keys)
            join(out, logs, [(piece.queries, block) for piece, block in pairs])
        ctx.save_for_backward(query, key, value, mask, out, finite(logs))
        ctx.part = part
        ctx.of = Moved(provenance_digest.digest(), "scaled_dot_product_attention")
        ctx.mark_non_differentiable(logs)
        return out.to(query.dtype), logs if part.shift is None else logs + part.shift.squeeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        part: AttentionPart = ctx.part
        saved, dtype = ctx.saved_tensors, grad.dtype
        if part.specs is None:
            grads = _gradients(part, saved, wide(grad))
        else:
            of = gradient_of(ctx.of, part.specs[0], grad)
            with moving(of.digest, of.operator, TensorText(part.specs[1], dtype)):
                grads = _gradients(part, saved, wide(grad))
        return *[x.to(dtype) for x in grads], None, None


def _gradients(part: AttentionPart, saved: Sequence[Any], grad: Tensor) -> list[Tensor]:
    """The gradients of query, key and value. Collective over the part's group."""
    query, key, value, mask, out, logs = saved
    grads = [torch.zeros_like(wide(x)) for x in (query, key, value)]
    returning: tuple[int, Arriving] | None = None
    for step, keys, k, v in part.rounds(key, value):
        found = [torch.zeros_like(wide(x)) for x in (k, v)] if step else grads[1:]
        for piece, block in part.blocks((query, k, v), mask, keys):
            rows = piece.queries
            parts = block.backward(grad[:, :, rows], out[:, :, rows], logs[:, :, rows])
            grads[0][:, :, rows].add_(parts[0])
            for total, each in zip(found, parts[1:], strict=True):
                if each.shape[1] != total.shape[1]:
                    each = torch.unflatten(each, 1, (total.shape[1], -1)).sum(2)
                total[:, :, piece.keys].add_(each)
        if returning is not None:
            _add(part.holders, grads[1:], *returning)
            returning = None
        if step:
            returning = step, part.message(step, found, back=True)
    if returning is not None:
        _add(part.holders, grads[1:], *returning)
    return grads


def _add(holders: Holders, totals: Sequence[Tensor], step: int, arriving: Arriving) -> None:
    """Add the gradients that another rank computed for keys of this rank."""
    for total, came in zip(totals, arriving(), strict=True):
        at = 0
        for rows in local_slices(holders.held[holders.me], holders.sent(step)):
            size = rows.stop - rows.start
            total[:, :, rows].add_(came[:, :, at : at + size])
            at += size
