"""The place of gathered parameters in autograd's graph.

The full tensors of a module, or of small modules that were gathered together, are results of one
node, :class:`GatherParameters`, whose inputs are the shards: leaves of the graph. Thus autograd
knows when all these gradients are there, which parameters a pass did not use, which were frozen,
and which hooks a shard has. The node's backward reduces the full gradients to those of the shards.

Full tensors that operators save for backward are not kept: :class:`Saved` stands for each, and
gathers again when backward asks for it, whichever way backward got there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from tilework.comm.per_call.internal import address_of
from tilework.dtensor.internal import torch_apply, wrap
from tilework.parallel.data_parallel.leaves import grad_dtype_of

if TYPE_CHECKING:
    from tilework.parallel.fully_sharded.flat import Gathering
    from tilework.parallel.fully_sharded.sharded_param import ShardedParam


_autograd: Any = torch._C._autograd
#: Releases of torch before 2.9 lack ``grad_dtype``.
_grad_dtype = attrgetter("grad_dtype" if hasattr(Tensor, "grad_dtype") else "dtype")
_dtype = attrgetter("dtype")


class GatherParameters(torch.autograd.Function):
    """Full tensors as results of the shards; backward reduces, and is collective."""

    apply: Any = torch_apply  # no argument is a DTensor

    @staticmethod
    def forward(
        ctx: Any,
        reduce: Callable[..., list[Tensor | None]],
        params: Sequence[ShardedParam],
        fulls: Sequence[Tensor],
        *shards: Tensor,
    ) -> tuple[Tensor, ...]:
        """The tensors ``fulls``, being gathered; ``reduce`` makes gradients of shards of theirs."""
        ctx.reduce, ctx.params = reduce, params
        ctx.set_materialize_grads(False)
        results = tuple(map(Tensor.detach, fulls))
        for shard, result in zip(shards, results, strict=True):
            if _grad_dtype(shard) is not _dtype(shard):
                result.grad_dtype = grad_dtype_of(shard)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """The gradients of the shards."""
        reduce = partial(ctx.reduce, [_is_wanted(node) for node, _ in ctx.next_functions])
        if torch.is_grad_enabled():  # create_graph: the reduction is in the new graph
            shards = AverageToShards.apply(reduce, ctx.params, *grads)  # type: ignore[no-untyped-call]
        else:
            shards = reduce(ctx.params, grads)
        return None, None, None, *shards


class AverageToShards(torch.autograd.Function):
    """The averages as shards; backward gathers: GatherParameters averages later."""

    @staticmethod
    def forward(
        ctx: Any,
        reduce: Callable[..., list[Tensor | None]],
        params: Sequence[ShardedParam],
        *grads: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        """The shards of the averages."""
        ctx.reduce, ctx.params = reduce, params
        ctx.set_materialize_grads(False)
        return tuple(reduce(params, grads))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        """The gathered gradients."""
        return None, None, *_gather_again(ctx.params, grads)


def _is_wanted(leaf: Any) -> bool:
    """False if the backward pass under way is for the gradients of other leaves only."""
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # torch.autograd.grad asks for it, which torch does not say otherwise
        return True


def _gather_again(
    params: Sequence[ShardedParam], shards: Sequence[Tensor | None]
) -> Iterator[Tensor]:
    """Gather tensors that are sharded as ``params`` are to full tensors. Collective."""
    for param, shard in zip(params, shards, strict=True):
        value = shard
        if value is None:
            value = torch.zeros_like(param.local, dtype=param.grad_dtype)
        whole = wrap(value.detach(), param.spec).full_tensor()
        tensor_parallel = param.tensor_parallel
        yield whole if tensor_parallel is None else tensor_parallel.local_part(whole)


def outside_transforms() -> AbstractContextManager[Any]:
    """A context outside of torch.func's transforms, which must not see the gathering."""
    if torch._C._are_functorch_transforms_active():
        return temporarily_clear_interpreter_stack()
    return nullcontext()


def can_save() -> bool:
    """False before torch 2.8 and within torch.func.grad: saved full tensors stay in memory."""
    return (
        _hooks_around is not None
        and _autograd._saved_tensors_hooks_get_disabled_error_message() is None
    )


class Saved:
    """A full tensor, or a view of one, that an operator has saved for backward."""

    __slots__ = ("local", "name", "offset", "shape", "stride", "use", "version", "which")

    def __init__(self, use: Any, which: int, tensor: Tensor, at: int, gathering: Gathering) -> None:
        self.use, self.which = use, which
        self.shape, self.stride, self.offset = tensor.shape, tensor.stride(), at // tensor.itemsize
        flat = gathering.flat
        param = flat.params[bisect_right(flat.offsets, self.offset) - 1]
        self.name, self.local = param.name, param.local  # the parameter may be swapped since
        self.version = self.local._version

    def tensor(self) -> Tensor:
        """The tensor; raises if the parameter was written to since. May be collective."""
        if self.local._version != self.version:
            raise RuntimeError(
                f"parameter {self.name} was written to in place after the forward pass whose "
                f"backward needs the value, for example by an optimizer step: call backward before"
            )
        gathering: Gathering = self.use.full().parts[self.which]
        place = gathering.base + self.offset
        return gathering.block.as_strided(self.shape, self.stride, place)


class _Kept:
    """A saved tensor that is no full parameter, and the writes to it; -1: not counted."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.version = -1 if tensor.is_inference() else tensor._version


#: Reads the surrounding hooks for saved tensors. Releases of torch before 2.8 lack it.
_hooks_around: Any = getattr(_autograd, "_top_saved_tensors_default_hooks", None)
_OWN_TYPES = (Tensor, torch.nn.Parameter)


class Saving:
    """Makes operators save a :class:`Saved` for full tensors, and others as hooks around say."""

    def __init__(self, use: Any, gatherings: Sequence[Gathering]) -> None:
        self._spans = [(part.span(), part) for part in gatherings]
        _autograd._push_saved_tensors_default_hooks(*_hooks(use, self._spans, _hooks_around(False)))

    def end(self) -> None:
        """Save as before."""
        _autograd._pop_saved_tensors_default_hooks()
        self._spans.clear()  # the graph keeps the hooks; they must not keep the memory


def _hooks(use: Any, spans: Sequence[tuple[range, Gathering]], around: Any) -> Any:
    """The functions that pack and unpack what operators save."""

    def pack(tensor: Tensor) -> Any:
        is_own = type(tensor) in _OWN_TYPES and tensor.layout is torch.strided
        if is_own and not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            address = address_of(tensor)
            for which, (span, part) in enumerate(spans):
                if address in span and tensor.dtype == part.block.dtype:
                    return Saved(use, which, tensor, address - span.start, part)
        return _Kept(tensor) if around is None else around[0](tensor)

    def unpack(saved: Any) -> Any:
        if type(saved) is Saved:
            return saved.tensor()
        if around is not None:
            return around[1](saved)
        if saved.version >= 0 and saved.tensor._version != saved.version:
            raise RuntimeError(
                f"a tensor of shape {list(saved.tensor.shape)} that backward needs was written to "
                f"in place after forward (version {saved.tensor._version}, {saved.version} when it "
                f"was saved): write to a clone of it"
            )
        return saved.tensor

    return pack, unpack
