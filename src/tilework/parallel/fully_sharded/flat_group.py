"""Parameters of one dtype that are gathered and reduced together, in one collective each way.

A rank's shards lie one after the other in one flat buffer, each padded to the size of the largest
rank's shard. Gathering stacks all ranks' buffers and copies each parameter out of the stack;
reducing copies the gradients into such a stack and reduce-scatters it.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from tilework.comm.collectives import all_gather_into_tensor, all_reduce, reduce_scatter_tensor
from tilework.comm.contract import ProcessGroup, Work
from tilework.comm.reduce_op import ReduceOp
from tilework.dtensor import DTensor
from tilework.dtensor.provenance.digests import digest_of
from tilework.dtensor.provenance.history import history_of
from tilework.dtensor.tensor import wrap
from tilework.parallel.fully_sharded.policies import MixedPrecisionPolicy
from tilework.parallel.fully_sharded.shards import ShardedParam, as_parameter

#: Gathering anew what autograd has saved is no change to it.
_keeping_versions: Any = torch.autograd.grad_mode._unsafe_preserve_version_counter


class FlatGroup:
    """The flat buffer of some parameters on this rank, and their collectives.

    Args:
        params: Of one dtype and device.
        shard_group: The ranks that the parameters are sharded over.
        replicate_group: The ranks with the same shards; None: there are none.
        policy: The dtypes.
    """

    def __init__(
        self,
        params: list[ShardedParam],
        shard_group: ProcessGroup,
        replicate_group: ProcessGroup | None,
        policy: MixedPrecisionPolicy,
    ) -> None:
        self.params, self.policy = params, policy
        self.shard_group, self.replicate_group = shard_group, replicate_group
        self.rank, self.ranks = shard_group.rank(), shard_group.size()
        self.dtype = params[0].dtype
        offset = 0
        for param in params:
            param.offset = offset
            offset += param.padded
        self.numel = offset
        #: What is gathered: the dtype of computation.
        is_cast = policy.param_dtype is not None and self.dtype.is_floating_point
        self.compute_dtype: torch.dtype = policy.param_dtype if is_cast else self.dtype  # type: ignore[assignment]
        self.flat: Tensor | None = None
        self.is_full = False
        self._pending: tuple[Tensor, Work | None] | None = None
        #: The flat buffer's version that was gathered: an optimizer's step makes another.
        self._version = -1

    # -- shards ------------------------------------------------------------------------------

    @torch.no_grad()
    def shard(self) -> None:
        """Keep this rank's shards of the full parameters, in the flat buffer. Local."""
        values = [_local_full(param) for param in self.params]
        self._make_flat(values[0].device)
        for param, value in zip(self.params, values, strict=True):
            local = self._local(param)
            if not local.is_meta:
                local.copy_(param.of_full(value, self.rank))
            param.sharded = as_parameter(local, param)
            param.install(param.sharded)

    @torch.no_grad()
    def adopt(self) -> None:
        """Take over parameters that ``Module._apply`` has moved or cast. Local."""
        values = [param.places[0][0]._parameters[param.places[0][1]] for param in self.params]
        locals_ = [value._local_tensor for value in values]  # type: ignore[union-attr]
        self.dtype = locals_[0].dtype
        if self.policy.param_dtype is None or not self.dtype.is_floating_point:
            self.compute_dtype = self.dtype
        self._make_flat(locals_[0].device)
        for param, value, old in zip(self.params, values, locals_, strict=True):
            param.dtype, param.full, param.full_local = self.dtype, None, None
            local = self._local(param)
            if not local.is_meta:
                local.copy_(old)
            param.sharded = value
            value._local_tensor.data = local  # type: ignore[union-attr]

    def _make_flat(self, device: torch.device) -> None:
        if device.type == "cpu":
            self.flat = self.shard_group.empty(self.numel, dtype=self.dtype).zero_()
        else:
            self.flat = torch.zeros(self.numel, dtype=self.dtype, device=device)

    def _local(self, param: ShardedParam) -> Tensor:
        assert self.flat is not None
        return param.in_row(self.flat, self.rank)

    # -- gathering ---------------------------------------------------------------------------

    def start_gather(self, async_op: bool) -> None:
        """Start to gather the parameters, unless they are there. Collective."""
        assert self.flat is not None
        if self._version != self.flat._version:
            self._discard()
        if self.is_full or self._pending is not None:
            return
        self._version = self.flat._version
        with torch.no_grad():
            mine = self.flat.to(self.compute_dtype)
            stack = mine.new_empty(self.ranks, self.numel)
            work = all_gather_into_tensor(
                stack.view(-1), mine, group=self.shard_group, async_op=async_op
            )
        self._pending = stack, work

    def finish_gather(self) -> None:
        """Wait for the gathered parameters, and let the modules hold them."""
        self.start_gather(False)
        if self.is_full:
            return
        assert self._pending is not None
        (stack, work), self._pending = self._pending, None
        if work is not None:
            work.wait()
        pairs = [pair for param in self.params for pair in self._pairs(param, stack)]
        fulls = [param.full_local for param in self.params]
        with torch.no_grad(), ExitStack() as versions:
            for full in fulls:  # torch 2.6 takes them one by one
                versions.enter_context(_keeping_versions(full))
            if pairs:
                torch._foreach_copy_([full for _, full in pairs], [row for row, _ in pairs])
        for param in self.params:
            if param.full_local.requires_grad != param.requires_grad:
                param.full.requires_grad_(param.requires_grad)
            if param.tensor_parallel is not None:
                # It was made on empty memory, and its values are those of the shards.
                param.full._digest = digest_of(param.sharded)
            param.install(param.full)
        self.is_full = True

    def _pairs(self, param: ShardedParam, stack: Tensor) -> list[tuple[Tensor, Tensor]]:
        if param.full is None:
            self._make_full(param, stack.device)
        local = param.full_local
        local.untyped_storage().resize_(local.numel() * local.itemsize)
        return param.rows_and_parts(stack, local.detach())

    def _make_full(self, param: ShardedParam, device: torch.device) -> None:
        local = torch.empty(param.shape, dtype=self.compute_dtype, device=device)
        value: Any = local
        if param.tensor_parallel is not None:
            value = wrap(local, param.tensor_parallel)
        param.full = nn.Parameter(value, requires_grad=param.requires_grad)
        param.full_local = param.full
        if isinstance(value, DTensor):
            param.full_local = param.full._local_tensor
            param.full._digest = None  # that of memory without contents yet
        vars(param.full).update(param.attributes)

    def free(self) -> None:
        """Give back the memory of the full parameters; modules hold the shards. Local."""
        if not self.is_full:
            return
        for param in self.params:
            param.install(param.sharded)
            param.full_local.untyped_storage().resize_(0)
        self.is_full = False

    def _discard(self) -> None:
        """Forget what was gathered: the shards have changed since."""
        self.free()
        if self._pending is not None:
            _, work = self._pending
            if work is not None:
                work.wait()
            self._pending = None

    def close(self) -> None:
        """Free the full parameters and what is being gathered, before the shards move. Local."""
        self._discard()

    # -- reducing ----------------------------------------------------------------------------

    @torch.no_grad()
    def reduce(self) -> None:
        """Average the full gradients over the ranks into the shards' gradients. Collective.

        A gradient that this rank does not have counts as zero. What none has stays None.
        """
        graded = [param for param in self.params if param.requires_grad and param.full is not None]
        if not graded:
            return
        dtype = self.policy.reduce_dtype or self.compute_dtype
        stack = graded[0].full_local.new_zeros(self.ranks, self.numel, dtype=dtype)
        pairs = []
        for param in graded:
            grad = param.full_local.grad
            if grad is not None:
                pairs += param.rows_and_parts(stack, grad)
        if pairs:
            torch._foreach_copy_([row for row, _ in pairs], [part for _, part in pairs])
        reduced = stack.new_empty(self.numel)
        reduce_scatter_tensor(reduced, stack.view(-1), ReduceOp.AVG, self.shard_group)
        del stack
        if self.replicate_group is not None and self.replicate_group.size() > 1:
            all_reduce(reduced, ReduceOp.AVG, self.replicate_group)
        for param in graded:
            self._accumulate(param, param.in_row(reduced, self.rank))
            param.full_local.grad = None
            # As of a backward pass, so that gradients tell which they are of.
            sharded = param.sharded
            history_of(sharded.device_mesh).note_gradient(digest_of(sharded))

    def _accumulate(self, param: ShardedParam, part: Tensor) -> None:
        local = param.sharded._local_tensor
        if local._backward_hooks or local._post_accumulate_grad_hooks:  # autograd calls them
            torch.autograd.backward([local], [part.to(local.dtype, copy=True)])
        elif local.grad is None:
            local.grad = part.to(local.dtype, copy=True)
        else:
            local.grad += part.to(local.dtype)


def _local_full(param: ShardedParam) -> Tensor:
    module, name = param.places[0]
    value: Any = module._parameters[name]
    return value._local_tensor if isinstance(value, DTensor) else value.detach()
