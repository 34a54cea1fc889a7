"""The memory of a bucket's gradients while ranks average them.

A large gradient is averaged where it lies, by a separate message: a byte moves less often than
with a copy into a common buffer, and no second copy is held. This needs memory that no other tensor
shows, since gradients may share memory with each other. All other gradients are copied into one
flat tensor, in the segment where peers read them, and back after the reduction.

A communication hook gets all gradients in the flat tensor. With ``gradient_as_bucket_view`` views
of the flat tensor become the gradients, and are not copied back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup
from tilework.comm.per_call.internal import current_recorder
from tilework.dtensor.internal import is_shared
from tilework.parallel.data_parallel.buckets import element_count
from tilework.parallel.data_parallel.leaves import as_is, grad_dtype_of, grad_view, lies_as

#: Gradients from this size on are averaged alone: a message costs less than two copies.
ALONE_BYTES = 256 << 10
_STRIDED = torch.strided
_grad = attrgetter("grad")


class _Memory(NamedTuple):
    """The memory, with views and their addresses: one value, which a captured call leaves whole.

    The view of a gradient that is averaged alone has no elements.
    """

    flat: Tensor
    views: list[Tensor]
    addresses: list[int]


class BucketMemory:
    """The memory of a bucket, with numbered places; ``keeps_views``: never replaced."""

    def __init__(
        self, tensors: Sequence[Tensor], dtype: torch.dtype, group: ProcessGroup, keeps_views: bool
    ) -> None:
        self.tensors, self.dtype = list(tensors), dtype
        self._group, self._keeps_views = group, keeps_views
        self._sizes = [element_count(tensor) for tensor in tensors]
        self.nbytes = sum(self._sizes) * dtype.itemsize
        as_they_are = all(grad_dtype_of(tensor) == dtype for tensor in tensors)
        #: Gradients that stay in the bucket after the pass.
        self._stays = as_they_are and keeps_views
        may_be_alone = as_they_are and tensors[0].device.type == "cpu"
        self._large = [
            place
            for place, size in enumerate(self._sizes)
            if may_be_alone and size * dtype.itemsize >= ALONE_BYTES
        ]
        #: The places that are averaged alone in this pass, if their memory allows it.
        self._alone: list[int] = []
        self._memory: _Memory | None = None
        #: In a pass: what ranks average, and by place a tensor in the gradient's shape.
        self.parts: list[Tensor] = []
        self._averages: list[Tensor] = []

    @property
    def flat(self) -> Tensor:
        """The gradients that are not averaged alone, one after the other."""
        return (self._memory or self._allocate()).flat

    @property
    def views(self) -> list[Tensor]:
        """A view of each gradient's part, in the gradient's shape."""
        return (self._memory or self._allocate()).views

    def _allocate(self) -> _Memory:
        first, sizes = self.tensors[0], list(self._sizes)
        for place in self._alone:
            sizes[place] = 0
        if first.device.type == "cpu":
            flat = self._group.empty(sum(sizes), dtype=self.dtype)
        else:
            flat = first.new_empty(sum(sizes), dtype=self.dtype)
        with torch.no_grad():
            ranges, alone = torch.split(flat, sizes), set(self._alone)
            views = [
                part if place in alone else grad_view(part, self.tensors[place])
                for place, part in enumerate(ranges)
            ]
        self._memory = _Memory(flat, views, list(map(Tensor.data_ptr, views)))
        return self._memory

    def discard(self) -> None:
        """Let go of the memory: gradients or a reduction keep it; the next use allocates."""
        self._memory = None
        self.parts, self._averages = [], []

    @torch.no_grad()
    def withdraw(self) -> None:
        """Let go of memory to which a reduction may still write: gradients there become copies."""
        for tensor, average in zip(self.tensors, self._averages, strict=False):
            if tensor.grad is average:
                tensor.grad = average.clone()
        self.discard()

    def open(self, whole: bool = False) -> None:
        """Prepare for a pass; ``whole``: all gradients are to lie in the flat tensor. Local."""
        if self._keeps_views:
            known = self._memory
            if known and known.addresses != list(map(Tensor.data_ptr, known.views)):
                self.discard()  # a cast of the module gave the gradients, our views, other data
        if self._large:
            alone = [] if whole or current_recorder() is not None else self._large
            if alone != self._alone:
                self._alone = alone
                self.discard()

    @torch.no_grad()
    def fill(self, missing: Collection[int] = ()) -> list[int]:
        """Copy in gradients that lie elsewhere, and zeros for absent ones, which are returned."""
        views = self.views
        if self._keeps_views:
            for place in missing:
                grad = self.tensors[place].grad
                if grad is None or grad.layout is not _STRIDED:
                    continue
                if grad.data_ptr() == views[place].data_ptr():
                    self.tensors[place].grad = grad.clone()
        grads = list(map(_grad, self.tensors))
        flat = self.flat
        self.parts = [flat] if flat.numel() else []
        if self._alone:
            views = list(views)
            for place in self._alone:
                part, views[place] = self._by_itself(place, grads[place], place in missing)
                self.parts.append(part)
        self._averages = views
        sources, targets, absent = [], [], []
        for place, (grad, view) in enumerate(zip(grads, views, strict=True)):
            if grad is None:
                view.zero_()
                absent.append(place)
            elif grad is not view:
                sources.append(grad.to_dense() if grad.is_sparse else as_is(grad))
                targets.append(view)
        if targets:
            torch._foreach_copy_(targets, sources)
        return absent

    def _by_itself(self, place: int, grad: Tensor | None, missing: bool) -> tuple[Tensor, Tensor]:
        """Memory that is averaged alone, flat and in the gradient's shape: the gradient's own if no
        other tensor shows it, and the gradient is of this pass.
        """
        tensor, numel = self.tensors[place], self._sizes[place]
        if grad is not None and not missing and lies_as(tensor, grad) and not is_shared(grad):
            return grad.as_strided((numel,), (1,)), grad
        part = torch.empty(numel, dtype=self.dtype, device="cpu")
        return part, grad_view(part, tensor)

    def hand_out(self, used: Sequence[bool] | None = None) -> None:
        """Make the averages the gradients, unless ``used`` is False at a place. Local."""
        targets, sources, stays = [], [], self._stays
        grads = map(_grad, self.tensors)
        for place, (grad, average) in enumerate(zip(grads, self._averages, strict=True)):
            if grad is average or (used is not None and not used[place]):
                continue
            if stays:  # a tensor may have been cast since forward
                self.tensors[place].grad = average.to(grad_dtype_of(self.tensors[place]))
            elif grad is None or grad.layout is not _STRIDED:
                dtype = grad_dtype_of(self.tensors[place])
                self.tensors[place].grad = average.to(dtype, copy=True)
            elif as_is(grad) is not grad:
                grad.copy_(average)
            else:
                targets.append(grad)
                sources.append(average)
        if targets:
            torch._foreach_copy_(targets, sources)
        self.parts, self._averages = [], []
