"""Sharded parameters of one dtype, with the collectives to gather and reduce them.

Gathering makes full tensors in one block of memory. A large parameter that is split in equally many
rows on each rank is gathered by a separate collective, straight from the shards to where modules
read. Small parameters share a collective: each rank sends the shards as a *row*, padded to the
largest rank's, and the full tensors are copied out of all rows. Other large parameters have a row
each. Reductions take the same ways back, straight from the memory where backward wrote large
gradients.

Small shards get their memory as a row, which is then sent as it is. The program may keep aliases of
parameters, or give them other memory. Therefore shards never move: those that do not lie as a row
are copied together before they are sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby, islice
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup, ReduceOp, Work
from tilework.comm.operations.internal import (
    all_gather_into_tensor,
    all_reduce,
    empty_tensor,
    reduce_scatter_tensor,
)
from tilework.comm.per_call.internal import address_of, device_kind
from tilework.cores import has_spare_core
from tilework.dtensor import DTensor
from tilework.dtensor.internal import local_tensor_of
from tilework.parallel.fully_sharded.policies import MixedPrecisionPolicy, Reduction
from tilework.parallel.fully_sharded.sharded_param import ShardedParam

#: From this size in bytes a separate collective gathers a shard; smaller copies cost less.
DIRECT_BYTES = 64 << 10


class Row:
    """Parameters whose shards lie one after the other, each padded to the largest rank's."""

    def __init__(self, params: Sequence[ShardedParam], rank: int) -> None:
        self.params, self.rooms = list(params), [param.padded for param in params]
        *self.offsets, self.numel = 0, *accumulate(self.rooms)
        self._rank = rank

    def mine(self, memory: Tensor) -> list[Tensor]:
        """The shards of this rank in a row."""
        rooms = memory[: self.numel].split_with_sizes(self.rooms) if self.rooms else ()
        return [
            (room if param.is_even else room[: param.numels[self._rank]]).view(
                param.shard_shapes[self._rank]
            )
            for param, room in zip(self.params, rooms, strict=True)
        ]

    def around(self, shards: Sequence[Tensor]) -> Tensor | None:
        """The memory in which a rank's shards lie as this row; None if they do not."""
        first, begin = shards[0], shards[0].storage_offset()
        storage = first.untyped_storage()
        is_row = begin + self.numel <= storage.nbytes() // first.itemsize and all(
            shard.is_contiguous()
            and shard.untyped_storage()._cdata == storage._cdata
            and shard.storage_offset() == begin + offset
            for shard, offset in zip(shards, self.offsets, strict=True)
        )
        return first.as_strided((self.numel,), (1,), begin).data if is_row else None


class Message:
    """A collective under way; then parts of what it brings are copied to full tensors."""

    def __init__(self, work: Work | None) -> None:
        self._work = work
        #: Views of the same elements: of what the message brings, and of full tensors.
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def finish(self) -> None:
        """Wait, then fill the full tensors."""
        if self._work is not None:
            self._work.wait()
        if self.pairs:
            columns, fulls = zip(*self.pairs, strict=True)
            torch._foreach_copy_(fulls, columns)


class Gathering:
    """The ``fulls``, full tensors of a flat, from element ``base`` of a ``block`` of memory on."""

    def __init__(self, flat: Flat, block: Tensor, base: int, ranges: Iterable[Tensor]) -> None:
        self.flat, self.block, self.base = flat, block, base
        self.fulls = list(map(Tensor.view, ranges, flat.shapes))

    def span(self) -> range:
        """The addresses of the full tensors."""
        begin = address_of(self.block) + self.base * self.block.itemsize
        return range(begin, begin + self.flat.full_bytes)


class Flat:
    """This rank's shards of parameters of one dtype and device, in kept or in new memory."""

    def __init__(
        self,
        params: Sequence[ShardedParam],
        kept: Sequence[Tensor | None],
        shard_group: ProcessGroup,
        replicate_group: ProcessGroup | None,
        policy: MixedPrecisionPolicy,
    ) -> None:
        self.params = list(params)
        self.dtype: torch.dtype = self.params[0].sharded.dtype
        self.device: torch.device = self.params[0].sharded.device
        self.is_meta = self.device.type == "meta"
        self.shard_group, self.replicate_group = shard_group, replicate_group
        self.rank, self.ranks = shard_group.rank(), shard_group.size()
        is_cast = policy.param_dtype is not None and self.dtype.is_floating_point
        #: The dtype of gathered parameters.
        self.compute_dtype: torch.dtype = policy.param_dtype if is_cast else self.dtype  # type: ignore[assignment]
        self._reduce_dtype = policy.reduce_dtype
        self.shards = self._placed(kept)
        place_of = {id(param): at for at, param in enumerate(self.params)}
        #: The places of parameters that are gathered without a row, by id of the parameter.
        self.direct = {
            id(p): at for at, p in enumerate(self.params) if p.is_even and self._is_large(p)
        }
        #: The rows of gathers, each with the places of the parameters, and the memory in which the
        #: shards lie as the row; None: they do not.
        self.rows = self._rows_of([p for p in self.params if id(p) not in self.direct])
        self.in_rows = [[place_of[id(param)] for param in row.params] for row in self.rows]
        self._memory = [
            row.around([self.shards[at] for at in places])
            for row, places in zip(self.rows, self.in_rows, strict=True)
        ]
        self.shapes = [param.shape for param in self.params]
        self.numels = [param.numel for param in self.params]
        self.offsets = [0, *accumulate(self.numels)][:-1]
        self.numel = sum(self.numels)
        self.full_bytes = self.numel * self.compute_dtype.itemsize
        #: False where the gathering thread would only take the core from the computing thread.
        kind = device_kind(self.params[0].sharded)
        self._overlaps = kind != "cpu" or has_spare_core(self.ranks)

    def _is_large(self, param: ShardedParam) -> bool:
        return param.padded * self.compute_dtype.itemsize >= DIRECT_BYTES

    def _rows_of(self, params: Sequence[ShardedParam]) -> list[Row]:
        """A row for each large parameter, and a row for all others, if there are any."""
        large = [Row([param], self.rank) for param in params if self._is_large(param)]
        small = [param for param in params if not self._is_large(param)]
        return [*large, Row(small, self.rank)] if small else large

    def _placed(self, kept: Sequence[Tensor | None]) -> list[Tensor]:
        """By parameter, the shard that is kept, or a shard in new memory."""
        pairs = list(zip(self.params, kept, strict=True))
        made: dict[int, Tensor] = {}
        first = self.params[0].sharded
        like = local_tensor_of(first) if isinstance(first, DTensor) else first.detach()
        for row in self._rows_of([param for param, shard in pairs if shard is None]):
            memory = _zeros(row.numel, like, self.shard_group)
            made.update(zip(map(id, row.params), row.mine(memory), strict=True))
        return [(made[id(param)] if shard is None else shard).data for param, shard in pairs]

    def check_dtype(self) -> None:
        """Raise if a parameter's dtype has changed: backward has no gradient for the new dtype."""
        for param in self.params:
            if param.local.dtype != self.dtype:
                raise RuntimeError(
                    f"parameter {param.name} was cast from {self.dtype} to {param.local.dtype} "
                    f"after the forward pass whose backward needs it: call backward before that"
                )

    def own_row(self, which: int) -> Tensor:
        """This rank's row ``which``: the memory itself, or copies of shards that lie elsewhere."""
        packed = self._memory[which]
        if packed is None:
            row = self.rows[which]
            packed = torch.zeros(row.numel, dtype=self.dtype, device=self.device)
            shards = [self.shards[at] for at in self.in_rows[which]]
            torch._foreach_copy_(row.mine(packed), shards)
        return packed.to(self.compute_dtype)

    def send(self, out: Tensor, mine: Tensor, async_op: bool) -> Work | None:
        """Start to gather from all ranks' ``mine``; None: it is done."""
        return all_gather_into_tensor(out, mine, self.shard_group, async_op and self._overlaps)

    # -- reducing ----------------------------------------------------------------------------

    def reduce_dtype(self, grad_dtype: torch.dtype | None) -> torch.dtype:
        """The dtype in which gradients are reduced that the program gave a dtype, or none."""
        return self._reduce_dtype or grad_dtype or self.compute_dtype

    def send_back(
        self, contributions: Tensor, numel: int, how: Reduction, grads: int | None = None
    ) -> Tensor:
        reduced, ranks = contributions.new_empty(numel), self.ranks
        is_average = how.divide_factor is None and not how.sums
        op = ReduceOp.AVG if is_average else ReduceOp.SUM
        reduce_scatter_tensor(reduced, contributions, op, self.shard_group)
        if self.replicate_group is not None and self.replicate_group.size() > 1:
            ranks *= self.replicate_group.size()
            all_reduce(reduced, op, self.replicate_group)
        if not is_average:
            reduced /= how.divide_factor or ranks
        if how.hook is not None:
            how.hook(reduced[:grads])  # the rest marks which gradients there are
        return reduced


class Gradient(NamedTuple):
    """A gradient of a full parameter, to reduce to that of a shard, which gets the ``dtype``."""

    flat: Flat
    param: ShardedParam
    dtype: torch.dtype | None
    grad: Tensor | None


def reduce(gradients: Sequence[Gradient], how: Reduction) -> list[Tensor | None]:
    """This rank's shards of averages; None: no rank has a gradient. Collective; blocks.

    The gradients of several flats have the same groups and dtype of reduction. Without grad mode.
    """
    first, rest = gradients[0].flat, []
    dtype = first.reduce_dtype(gradients[0].dtype)
    shards: dict[int, Tensor] = {}
    parts: list[Tensor] = []
    for flat, param, _, grad in gradients:
        if grad is None:
            whole = torch.zeros(param.shape, dtype=dtype, device=flat.device)
        else:
            whole = grad.to(dtype).contiguous()
        if id(param) in flat.direct:
            shard = first.send_back(whole.view(-1), param.padded, how)
            shards[id(param)] = shard.view(param.shard_shapes[0])
        else:
            rest.append(param)
            parts.append(param.by_rank(whole))
    used = [each.grad is not None for each in gradients]
    marks = torch.ones(first.ranks, len(used), dtype=dtype, device=first.device)
    if not all(used):
        marks *= marks.new_tensor(used)
    row = Row(rest, first.rank)
    rows = torch._chunk_cat([*filter(Tensor.numel, parts), marks], 0, first.ranks)
    reduced = first.send_back(rows.view(-1), rows.shape[1], how, row.numel)
    shards.update(zip(map(id, rest), row.mine(reduced), strict=True))
    if not all(used) and not reduced.is_meta:  # else each rank is as this rank
        used = (reduced[row.numel :] > 0).tolist()
    return [
        shards[id(param)].to(wanted or flat.dtype) if has_grad else None
        for (flat, param, wanted, _), has_grad in zip(gradients, used, strict=True)
    ]


def _in_blocks(flats: Sequence[Flat]) -> Iterator[Gathering]:
    """Memory to gather to: a block for flats in a row that compute with the same dtype."""
    for (dtype, device), group in groupby(flats, attrgetter("compute_dtype", "device")):
        alike, base = list(group), 0
        numels = [numel for flat in alike for numel in flat.numels]
        block = empty_tensor((sum(numels),), dtype, device)
        ranges = iter(block.split_with_sizes(numels))
        for flat in alike:
            yield Gathering(flat, block, base, islice(ranges, len(flat.numels)))
            base += flat.numel


def gather(flats: Sequence[Flat], async_op: bool) -> tuple[list[Gathering], list[Message]]:
    """Start to gather the buffers' full parameters, small rows in a common message. Collective."""
    gatherings, messages = list(_in_blocks(flats)), list[Message]()
    rows_of: dict[Any, list[tuple[Gathering, int]]] = {}
    for flat, gathering in zip(flats, gatherings, strict=True):
        for at in flat.direct.values():
            mine = flat.shards[at].to(flat.compute_dtype).contiguous().view(-1)
            messages.append(Message(flat.send(gathering.fulls[at].view(-1), mine, async_op)))
        for which, row in enumerate(flat.rows):
            is_large = row.numel * flat.compute_dtype.itemsize >= DIRECT_BYTES
            key = row if is_large else (flat.compute_dtype, flat.device, flat.shard_group)
            rows_of.setdefault(key, []).append((gathering, which))
    for members in rows_of.values():
        sent = [gathering.flat.own_row(which) for gathering, which in members]
        mine = sent[0] if len(sent) == 1 else torch.cat(sent)
        first = members[0][0].flat
        rows = mine.new_empty(first.ranks, mine.numel())
        messages.append(message := Message(first.send(rows.view(-1), mine, async_op)))
        rooms = [room for gathering, at in members for room in gathering.flat.rows[at].rooms]
        columns = iter(rows.split_with_sizes(rooms, 1))
        for gathering, which in members:
            flat = gathering.flat
            for param, place in zip(flat.rows[which].params, flat.in_rows[which], strict=True):
                message.pairs += param.shards_and_parts(next(columns), gathering.fulls[place])
    return gatherings, messages


def _zeros(numel: int, like: Tensor, group: ProcessGroup) -> Tensor:
    """Zeros; on the CPU in memory that operations of ``group`` read in place, without a copy."""
    if like.device.type == "cpu":
        return group.empty(numel, dtype=like.dtype).zero_()
    return like.new_zeros(numel)
