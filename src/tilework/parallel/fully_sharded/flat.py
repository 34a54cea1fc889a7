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

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

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


@dataclass(frozen=True)
class Row:
    """Some parameters, and where each begins in a rank's row.

    Attributes:
        params: The parameters.
        offsets: By parameter, the index of the first element in the row; at the end, the row's
            number of elements.
    """

    params: tuple[ShardedParam, ...]
    offsets: tuple[int, ...]

    @staticmethod
    def of(params: Sequence[ShardedParam]) -> Row:
        """The row of these parameters, in this order."""
        return Row(tuple(params), (0, *accumulate(param.padded for param in params)))

    @property
    def numel(self) -> int:
        return self.offsets[-1]

    def around(self, shards: Sequence[Tensor]) -> Tensor | None:
        """The memory in which a rank's shards lie as this row; None if they do not."""
        first, begin = shards[0], shards[0].storage_offset()
        storage = first.untyped_storage()
        is_row = begin + self.numel <= storage.nbytes() // first.itemsize and all(
            shard.is_contiguous()
            and shard.untyped_storage()._cdata == storage._cdata
            and shard.storage_offset() == begin + offset
            for shard, offset in zip(shards, self.offsets, strict=False)
        )
        return first.as_strided((self.numel,), (1,), begin).data if is_row else None

    def split(self, rows: Tensor) -> Sequence[Tensor]:
        """By parameter, the columns of all ranks' rows that hold the parameter's shards."""
        return rows.split_with_sizes([param.padded for param in self.params], 1)

    def fill(self, rows: Tensor, grads: Sequence[Tensor | None]) -> None:
        """Copy the shards of full gradients to all ranks' rows; a missing gradient leaves them."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for param, grad, shards in zip(self.params, grads, self.split(rows), strict=True):
            if grad is not None:
                pairs += param.shards_and_parts(shards, grad)
        if pairs:
            torch._foreach_copy_([shard for shard, _ in pairs], [part for _, part in pairs])


class Gathering:
    """Full parameters, gathered or being gathered.

    Attributes:
        block: The memory of all full parameters, one after the other.
        fulls: By parameter, the full local tensor.
    """

    def __init__(
        self, block: Tensor, fulls: list[Tensor], params: list[ShardedParam], offsets: list[int]
    ) -> None:
        self.block, self.fulls = block, fulls
        self._params, self._offsets = params, offsets
        self.begin = address_of(block)
        self.end = self.begin + block.nbytes
        self.works: list[Work] = []
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def param_at(self, offset: int) -> ShardedParam:
        """The parameter whose full tensor has the element at ``offset`` of the block."""
        return self._params[bisect_right(self._offsets, offset) - 1]

    def finish(self) -> None:
        """Wait for the gathers of :meth:`Flat.gather`, then fill the full tensors. Idempotent."""
        for work in self.works:
            work.wait()
        if self.pairs:
            with torch.no_grad():
                full, rows = zip(*self.pairs, strict=True)
                torch._foreach_copy_(list(full), list(rows))
        self.works, self.pairs = [], []


class Flat:
    """The shards of parameters of one dtype and device on this rank.

    Args:
        params: The parameters, whose ``sharded`` may still be full tensors.
        kept: By parameter, the shard whose memory stays; None: the shard gets new memory.
        shard_group: The ranks that the parameters are sharded over.
        replicate_group: The ranks with the same shards; None: there are none.
        policy: The dtypes of gathered parameters and of reductions.

    Attributes:
        shards: By parameter, this rank's shard, with a separate count of writes.
    """

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
        self.shard_group, self.replicate_group = shard_group, replicate_group
        self.rank, self.ranks = shard_group.rank(), shard_group.size()
        is_cast = policy.param_dtype is not None and self.dtype.is_floating_point
        #: The dtype of gathered parameters.
        self.compute_dtype: torch.dtype = policy.param_dtype if is_cast else self.dtype  # type: ignore[assignment]
        self._reduce_dtype = policy.reduce_dtype
        self.shards = self._placed(kept)
        shard_of = dict(zip(map(id, self.params), self.shards, strict=True))
        others = [param for param in self.params if not self._is_direct(param)]
        if len(others) == 1 and others[0].is_even:  # it would share a collective with none
            others = []
        #: The places of parameters that are gathered without a row.
        self._direct = [at for at, param in enumerate(self.params) if param not in others]
        #: The rows of gathers, each with the shards, and the memory if they lie there as a row.
        self._rows: list[tuple[Row, list[Tensor], Tensor | None]] = []
        for row in self._rows_of(others):
            shards = [shard_of[id(param)] for param in row.params]
            self._rows.append((row, shards, row.around(shards)))
        #: False where the gathering thread would only take the core from the computing thread.
        kind = device_kind(self.params[0].sharded)
        self._overlaps = kind != "cpu" or has_spare_core(self.ranks)

    def _is_large(self, param: ShardedParam) -> bool:
        return param.padded * self.compute_dtype.itemsize >= DIRECT_BYTES

    def _is_direct(self, param: ShardedParam) -> bool:
        return param.is_even and self._is_large(param)

    def _rows_of(self, params: Sequence[ShardedParam]) -> list[Row]:
        """A row for each large parameter, and a row for all others, if there are any."""
        large = [Row.of([param]) for param in params if self._is_large(param)]
        small = Row.of([param for param in params if not self._is_large(param)])
        return [*large, small] if small.params else large

    def _placed(self, kept: Sequence[Tensor | None]) -> list[Tensor]:
        """By parameter, the shard that is kept, or a shard in new memory."""
        pairs = list(zip(self.params, kept, strict=True))
        made = {}
        first = self.params[0].sharded
        like = local_tensor_of(first) if isinstance(first, DTensor) else first.detach()
        for row in self._rows_of([param for param, shard in pairs if shard is None]):
            memory = _zeros(row.numel, like, self.shard_group)
            for param, offset in zip(row.params, row.offsets, strict=False):
                made[id(param)] = param.in_row(memory, offset, self.rank)
        return [(made[id(param)] if shard is None else shard).data for param, shard in pairs]

    def check_dtype(self) -> None:
        """Raise if a parameter's dtype has changed: backward has no gradient for the new dtype."""
        for param in self.params:
            if param.local.dtype != self.dtype:
                raise RuntimeError(
                    f"parameter {param.name} was cast from {self.dtype} to {param.local.dtype} "
                    f"after the forward pass whose backward needs it: call backward before that"
                )

    # -- gathering ---------------------------------------------------------------------------

    @torch.no_grad()
    def gather(self, async_op: bool) -> Gathering:
        """Start to gather the full parameters. Collective over the sharding group.

        With ``async_op`` it returns at once if another core can gather; ``finish`` waits.
        """
        async_op = async_op and self._overlaps
        gathering = self._empty()
        for at in self._direct:
            mine = self.shards[at].to(self.compute_dtype).contiguous()
            self._start(gathering, gathering.fulls[at].view(-1), mine.view(-1), async_op)
        full_of = dict(zip(map(id, self.params), gathering.fulls, strict=True))
        for row, parts, in_place in self._rows:
            mine = self._packed(row, parts) if in_place is None else in_place
            mine = mine.to(self.compute_dtype)
            rows = mine.new_empty(self.ranks, row.numel)
            self._start(gathering, rows.view(-1), mine, async_op)
            for param, shards in zip(row.params, row.split(rows), strict=True):
                pairs = param.shards_and_parts(shards, full_of[id(param)])
                gathering.pairs += [(part, shard) for shard, part in pairs]
        return gathering

    def _packed(self, row: Row, shards: Sequence[Tensor]) -> Tensor:
        """A row of copies of shards that do not lie as a row."""
        packed = torch.zeros(row.numel, dtype=self.dtype, device=self.device)
        places = zip(row.params, row.offsets, strict=False)
        parts = [param.in_row(packed, offset, self.rank) for param, offset in places]
        torch._foreach_copy_(parts, list(shards))
        return packed

    def _empty(self) -> Gathering:
        """Memory for all full parameters: contiguous tensors one after the other."""
        sizes = [param.numel for param in self.params]
        offsets = [0, *accumulate(sizes)]
        block = empty_tensor((offsets[-1],), self.compute_dtype, self.device)
        parts = block.split_with_sizes(sizes)
        fulls = [part.view(param.shape) for part, param in zip(parts, self.params, strict=True)]
        return Gathering(block, fulls, self.params, offsets[:-1])

    def _start(self, gathering: Gathering, out: Tensor, mine: Tensor, async_op: bool) -> None:
        work = all_gather_into_tensor(out, mine, self.shard_group, async_op)
        if work is not None:
            gathering.works.append(work)

    # -- reducing ----------------------------------------------------------------------------

    def reduce_dtype(self, param: ShardedParam) -> torch.dtype:
        """The dtype in which gradients of a parameter are reduced."""
        return self._reduce_dtype or param.grad_dtype or self.compute_dtype

    @torch.no_grad()
    def reduce(
        self, params: Sequence[ShardedParam], grads: Sequence[Tensor | None], how: Reduction
    ) -> list[Tensor | None]:
        """This rank's shards of the gradients' averages over all ranks. Collective; blocks.

        A gradient that only some ranks have counts as zero on the others.

        Args:
            params: Parameters of this buffer, the same on all ranks, with one ``reduce_dtype``.
            grads: By parameter, this rank's gradient of the full tensor; None: there is none.
            how: How to average.

        Returns:
            By parameter, the shard in the gradient's dtype; None: no rank has a gradient.
        """
        dtype = self.reduce_dtype(params[0])
        pairs = list(zip(params, grads, strict=True))
        results = {
            id(param): self._reduce_alone(param, grad, how)
            for param, grad in pairs
            if self._is_direct(param)
        }
        together = [(param, grad) for param, grad in pairs if id(param) not in results]
        # Each row ends with a mark for each parameter: above zero where a rank has a gradient.
        row = Row.of([param for param, _ in together])
        marks = [float(grad is not None) for grad in grads]
        rows = torch.zeros(self.ranks, row.numel + len(marks), dtype=dtype, device=self.device)
        row.fill(rows[:, : row.numel], [grad for _, grad in together])
        rows[:, row.numel :] = 1.0 if all(marks) else rows.new_tensor(marks)
        reduced = self._reduce(rows.view(-1), rows.shape[1], how, row.numel)
        for param, offset in zip(row.params, row.offsets, strict=False):
            results[id(param)] = param.in_row(reduced, offset, self.rank)
        used = [mark > 0 for mark in marks]
        if not all(marks) and not reduced.is_meta:  # else each rank is as this rank
            used = (reduced[row.numel :] > 0).tolist()
        return [
            results[id(param)].to(param.grad_dtype or self.dtype) if has_grad else None
            for param, has_grad in zip(params, used, strict=True)
        ]

    def _reduce_alone(self, param: ShardedParam, grad: Tensor | None, how: Reduction) -> Tensor:
        if grad is None:
            grad = torch.zeros(param.shape, dtype=self.compute_dtype, device=self.device)
        contribution = grad.to(self.reduce_dtype(param)).contiguous()
        return self._reduce(contribution.view(-1), param.padded, how).view(param.shard_shapes[0])

    def _reduce(
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


def _zeros(numel: int, like: Tensor, group: ProcessGroup) -> Tensor:
    """Zeros; on the CPU in memory that operations of ``group`` read in place, without a copy."""
    if like.device.type == "cpu":
        return group.empty(numel, dtype=like.dtype).zero_()
    return like.new_zeros(numel)
