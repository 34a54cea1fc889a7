"""The ways to attend where queries and keys are sharded along the sequence, chosen by price.

*gather*: each rank gets all keys. *ring*: keys come in messages, behind the arithmetic.
*heads*: for the time of the call, heads are sharded instead of the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from tilework.dtensor.base import layout_of
from tilework.dtensor.propagation.strategy import Strategy
from tilework.dtensor.random.generator import next_key
from tilework.dtensor.rules.attention import (
    Attention,
    are_keys_sharded,
    decomposed_attention,
    default_scale,
    gathered_attention,
    of_parts,
)
from tilework.dtensor.rules.attention_blocks import NARROW, KeyPattern, Range
from tilework.dtensor.rules.internal_ops import internal_operator
from tilework.dtensor.rules.ring_attention import AttentionPart, Dropout, Holders
from tilework.dtensor.spec import DTensorSpec, Ints
from tilework.dtensor.tensor import DTensor
from tilework.layout import Box, Shard
from tilework.layout.internal import DEFAULT_COST
from tilework.tiled import Decomposition, Factor, LocalRanges, RuleResult, dtensor_rule, local_call

Way = Literal["auto", "gather", "ring", "heads"]
#: The prices of a message beside the arithmetic of another thread, in those of a message alone:
#: measured (benchmarks/attention.py).
_MEETING = 8
#: The multiplications and additions of a thread while a byte moves (the same).
_OPERATIONS = 16
_way: ContextVar[Way] = ContextVar("way", default="auto")


@contextmanager
def context_parallel(way: Way = "auto") -> Iterator[None]:
    """Choose how attention runs in this block where the sequence is sharded. Local.

    ``F.scaled_dot_product_attention`` on DTensors whose queries, keys and values are sharded along
    the sequence by p ranks computes the result of one process in each of three ways. Queries and
    result stay where they are. With n the bytes of all keys, and g queries' heads for each of the
    keys' heads, a rank gets

    - ``"gather"``: all keys and values, 2n(p-1)/p bytes, before it computes;
    - ``"ring"``: as many, in p-1 messages, while it computes; it holds two of p blocks;
    - ``"heads"``: the whole sequence for some heads, (2g+2)(n/p)(p-1)/p bytes in four
      ``all_to_all``. Fewer heads of keys than ranks are copied.

    Open the block on all ranks. A checkpointed layer is computed again in ``backward()``: call that
    within the block, too.

    Args:
        way: ``"auto"``: the cheapest, by bytes and latencies; a ring where messages are long
            enough to run behind the arithmetic.

    Raises:
        ValueError: There is no such way; or, by attention within the block, the way does not serve
            the call: queries' heads are fewer than ranks (``"heads"``), there are not as many
            queries as keys, or a mask requires a gradient (``"ring"``).
        NotImplementedError: By attention within the block: a ring within ``torch.func``.

    Example:
        >>> import torch
        >>> from torch.nn.functional import scaled_dot_product_attention
        >>> from tilework.dtensor import Shard, context_parallel, explain, init_device_mesh, rand
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
        ...     x = rand(1, 4, 32, 8, device_mesh=mesh, placements=[Shard(2)])
        ...     with explain() as log, context_parallel("ring"):
        ...         scaled_dot_product_attention(x, x, x)
        ...     return [event.collective for event in log.events]
        >>> run_ranks(4, program)[0]
        ['message', 'message', 'message']
    """
    if way not in get_args(Way):
        raise ValueError(f"way must be one of {', '.join(map(repr, get_args(Way)))}, got {way!r}")
    token = _way.set(way)
    try:
        yield
    finally:
        _way.reset(token)


@dtensor_rule("scaled_dot_product_attention")
def _attention(*args: Any, **kwargs: Any) -> RuleResult:
    call = Attention(*args, **kwargs)
    if any(tensor.ndim < 2 + call.enable_gqa for tensor in call.tensors):
        return None  # torch raises when the call runs
    if call.is_causal and call.attn_mask is not None:
        # Some kernels apply both, others raise: all ranks run the whole call, as one process does.
        return None
    if not call.fits():
        return None  # as above
    if sequence_axes(*[each.spec for each in call.tensors]):
        return Decomposition(_attend)
    if call.dropout_p > 0 or are_keys_sharded(*call.tensors):
        return Decomposition(decomposed_attention)
    return of_parts(*call.all)


def sequence_axes(*specs: DTensorSpec) -> Ints:
    """The axes that shard the sequence, the last dim but one, of all tensors."""
    first, *others = [spec.axes_of(spec.ndim - 2) for spec in specs]
    return tuple(
        [a for a in first if specs[0].mesh.shape[a] > 1 and all(a in each for each in others)]
    )


class _Call(Attention):
    """A call of attention on DTensors whose sequence is sharded."""

    @cached_property
    def axes(self) -> Ints:
        """The axes that shard the sequence."""
        return sequence_axes(*map(layout_of, self.tensors))

    @cached_property
    def ranks(self) -> int:
        """The number of ranks that share the sequence."""
        return self._ranks_along(self.axes)

    @cached_property
    def heads(self) -> tuple[int, int]:
        """The heads of queries and of keys; 0 where there is no dim for them."""
        queries, keys = [x.size(-3) if x.dim() > 2 else 0 for x in (self.query, self.key)]
        return queries, keys

    @cached_property
    def copies(self) -> int:
        """The copies of each head of the keys that give all ranks some; 0: none will do."""
        queries, keys = self.heads
        if not keys or queries % keys:
            return 0
        sharing = queries // keys
        enough = [n for n in range(1, sharing + 1) if n * keys >= self.ranks]
        return next((n for n in enough if sharing % n == 0), 0)

    def way(self) -> Way:
        """The way that the program chose, or else the cheapest."""
        chosen = _way.get()
        if chosen == "auto":
            return self._cheapest()
        obstacles = {"ring": self._against_ring, "heads": self._against_heads}
        reason = obstacles[chosen]() if chosen in obstacles else ""
        if reason:
            raise ValueError(f"context_parallel({chosen!r}) cannot run this attention: {reason}")
        return chosen

    def run(self) -> Tensor:
        """The result. Collective."""
        way = self.way()
        if not self._adds_up(way):
            return self._by(way)
        return _Call(*self.widened().all)._by(way).to(self.query.dtype)

    def _adds_up(self, way: Way) -> bool:
        """True if ranks add up gradients of keys that have 16 bits, too few: rounded parts."""
        adds = way == "gather" or (way == "heads" and self.copies > 1)
        return adds and self.query.dtype in NARROW

    def _by(self, way: Way) -> Tensor:
        mask = self.attn_mask
        if way == "heads":
            return self._by_heads()
        if way == "ring":
            pattern = (-1, 0 if self.is_causal else -1, ())
            mask = mask if mask is None else mask.expand(*mask.shape[:-1], self.key.size(-2))
            how = self.dropout_p, pattern, self.scale, self.enable_gqa
            return ring_attention(*self.tensors, mask, *how)[0]
        run = decomposed_attention if self.dropout_p > 0 else gathered_attention
        return run(*self.all)

    def _cheapest(self) -> Way:
        """The way that moves the fewest bytes; of gather and ring, as messages are long."""
        queries, keys = (
            x._spec.nbytes(x.element_size()) / self._ranks_along(x._spec.sharded_axes)
            for x in (self.query, self.key)
        )
        latency, others = DEFAULT_COST.latency_bytes, self.ranks - 1
        gathered = 2 * (latency + keys * others * (1 + self._adds_up("gather"))) + self._waiting()
        moved = (queries + keys * self.copies) * (1 + self._adds_up("heads"))
        moved = 4 * latency + 2 * moved * others / self.ranks
        even = self.heads[1] * self.copies % self.ranks == 0
        if even and moved < gathered and self.attn_mask is None and not self._against_heads():
            return "heads"
        is_cheap = self.dropout_p > 0 or (
            self.query.device.type == "cpu" and self.query.size(-1) == self.value.size(-1)
        )
        if is_cheap and 2 * keys > _MEETING * latency and not self._against_ring():
            return "ring"
        return "gather"

    def _waiting(self) -> float:
        """The bytes that could move while the last rank of a causal sequence computes longer.

        Of contiguous shards it has (2p-1)/p times the mean of pairs; heads have equally many.
        """
        spec = layout_of(self.query)
        if not self.is_causal or spec.is_dealt:
            return 0
        more = self.query.size(-2) ** 2 * (self.ranks - 1) / (2 * self.ranks**2)
        heads = math.prod(self.query.shape[:-2]) / self._ranks_along(
            axis for axis in spec.sharded_axes if axis not in self.axes
        )
        width = self.query.size(-1) + self.value.size(-1)
        return float(2 * more * heads * width / _OPERATIONS)

    def _ranks_along(self, axes: Iterable[int]) -> int:
        lengths: Ints = self.query.device_mesh.spec.shape
        return math.prod([lengths[axis] for axis in axes])

    # -- ring --------------------------------------------------------------------------------

    def _against_ring(self) -> str:
        """The reason for which a ring does not serve; "" if it does."""
        query, key, value = self.tensors
        batches = {tuple(x.shape[: -3 if self.enable_gqa else -2]) for x in self.tensors}
        if not query.size(-2) == key.size(-2) == value.size(-2):
            return f"it needs as many queries as keys, got {query.size(-2)} and {key.size(-2)}"
        if len(batches) > 1:
            return f"it needs equal batches, and does not broadcast them, got {sorted(batches)}"
        mask = self.attn_mask
        if mask is not None and mask.requires_grad and torch.is_grad_enabled():
            return "the mask requires a gradient; 'gather' gives it one"
        return ""

    # -- heads -------------------------------------------------------------------------------

    def _against_heads(self) -> str:
        """The reason for which heads do not serve; "" if they do."""
        queries, keys = self.heads
        if not self.copies:
            return (
                f"{queries} heads of queries are fewer than the {self.ranks} ranks, or no multiple "
                f"of the {keys} heads of keys"
            )
        if len(self.axes) > 1:
            return f"{len(self.axes)} axes of the mesh shard the sequence, and heads go to one"
        others = self._ranks_along(layout_of(self.query).axes_of(self.query.dim() - 3))
        if others > 1 and keys * self.copies % (others * self.ranks):
            return (
                f"{others} ranks along another axis divide the {keys} heads of keys, which are no "
                f"multiple of {others} * {self.ranks}"
            )
        return ""

    def _by_heads(self) -> Tensor:
        """The result, for which heads instead of the sequence are sharded. Collective."""
        queries, keys = self.heads
        keys *= self.copies
        share = [keys // self.ranks + (r < keys % self.ranks) for r in range(self.ranks)]
        query = self._to_heads(self.query, share, queries // keys)
        key, value = [self._to_heads(_copied(x, self.copies), share) for x in self.tensors[1:]]
        given = self.attn_mask, self.dropout_p, self.is_causal, self.scale
        shares = self.enable_gqa and queries != keys
        out = Attention(query, key, value, *given, enable_gqa=shares).by_torch()
        assert isinstance(out, DTensor)
        back = layout_of(self.query)
        return out.redistribute(placements=back.placements, order=back.order)

    def _to_heads(self, x: DTensor, share: Sequence[int], each: int = 1) -> DTensor:
        (axis,), spec, dim = self.axes, layout_of(x), x.dim() - 3
        placements = list(spec.placements)
        others = [other for other in spec.axes_of(dim) if other != axis]
        sizes = None if others else tuple([heads * each for heads in share])
        placements[axis] = Shard(dim, sizes)
        order = [a for a in spec.order or range(spec.mesh.ndim) if a != axis]
        return x.redistribute(placements=placements, order=[*order, axis])


def _copied(x: DTensor, copies: int) -> DTensor:
    """The tensor with each head several times, next to each other. Local."""
    if copies == 1:
        return x
    shape = (*x.shape[:-2], copies, *x.shape[-2:])
    result = x.unsqueeze(-3).expand(shape).flatten(-4, -3)
    assert isinstance(result, DTensor)
    return result


def _attend(*args: Any, **kwargs: Any) -> Tensor:
    """Attention where the sequence is sharded, in the chosen or the cheapest way. Collective."""
    return _Call(*args, **kwargs).run()


def _ring_rule(
    query: Any, key: Any, value: Any, mask: Any, dropout: float, *how: Any
) -> RuleResult:
    """The rule of a ring: queries and keys share a factor, and the local function gets the rest."""
    pattern, scale, gqa = how
    sequence = Factor(query.shape[-2], "sequence")
    columns = Factor(key.shape[-2], "keys", unshardable=True)
    call = Attention(query, key, value, mask, dropout, scale=scale, enable_gqa=gqa)
    dims = call.dims(sequence, sequence, columns)
    if dims is None:
        return None
    out, inputs = dims

    def run(ranges: LocalRanges) -> Callable[..., Any]:
        assert isinstance(ranges, Strategy)
        specs = ranges.inputs[query.number], ranges.inputs[key.number]
        axes, keys_of = ranges.axes(sequence), KeyPattern.of(*pattern)

        def attend(*tensors: Tensor) -> tuple[Tensor, Tensor]:
            q, k, v, *masks = tensors
            part = part_of(specs, axes, keys_of, default_scale(q, scale))
            if dropout > 0:
                shape = (*specs[0].shape[:-1], specs[1].shape[-2])
                first = specs[0].local_boxes[0].offsets[:-2]
                drawn = Dropout(dropout, next_key(specs[0].mesh), shape, first)
                part = replace(part, dropout=drawn)
            return part.attend(q, k, v, masks[0] if masks else None)

        return attend

    return local_call(inputs, [out, out[:-1]], run=run)


def part_of(
    specs: tuple[DTensorSpec, DTensorSpec], axes: Ints, pattern: KeyPattern, scale: float
) -> AttentionPart:
    """This rank's part of attention, by the layouts. Local, but the first call makes the group."""
    mesh, length = specs[0].mesh, specs[1].shape[-2]
    group = mesh.axes_group(axes) if axes else None
    ranks = [mesh.get_rank()] if group is None else group.global_ranks
    queries, held = [
        tuple([tuple([_rows(box) for box in spec.tiling.boxes_of(rank)]) for rank in ranks])
        for spec in specs
    ]
    needed = tuple([pattern.needed(each, length) for each in queries])
    me = 0 if group is None else group.rank()
    return AttentionPart(Holders(me, held, needed), queries[me], pattern, scale, group, specs)


def _rows(box: Box) -> Range:
    return box.offsets[-2], box.offsets[-2] + box.sizes[-2]


@internal_operator(_ring_rule)
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, *how: Any
) -> tuple[Tensor, Tensor]:
    """Attention whose keys come in messages: the result, and the logarithms of sums of weights."""
    pattern, scale, _ = how  # for shapes: nothing is dropped
    rows, keys = (0, query.size(-2)), key.size(-2)
    part = AttentionPart.alone(rows, keys, KeyPattern.of(*pattern), default_scale(query, scale))
    return part.attend(query, key, value, mask)
