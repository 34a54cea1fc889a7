"""The memory of a bucket: gradients one after the other, in the segment where peers read them.

A gradient gets there in one of two ways. A *moved* gradient is copied while backward still has it
in the caches, and the copy becomes the parameter's gradient: it lies in the bucket, is averaged in
place, and has no second copy. The other gradients, small or kept by the program, are copied in
before the reduction and copied back after it.

Without ``gradient_as_bucket_view``, a moved gradient is a separate tensor that keeps the bucket's
memory alive: as long as the program holds a gradient from an earlier pass, that memory is not
written again.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Collection, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup
from tilework.comm.per_call.internal import address_of
from tilework.parallel.data_parallel.buckets import element_count
from tilework.parallel.data_parallel.leaves import grad_dtype_of, grad_view

#: Gradients from this size on are moved singly; a smaller copy costs less than the call.
MOVED_BYTES = 16 << 10


_STRIDED = torch.strided
_grad = attrgetter("grad")


class _Memory(NamedTuple):
    """The memory, with views and their addresses: one value, which a captured call leaves whole."""

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
        self._offsets = [0, *accumulate(self._sizes)]
        self.nbytes = self._offsets[-1] * dtype.itemsize
        on_cpu = tensors[0].device.type == "cpu"
        as_they_are = all(grad_dtype_of(tensor) == dtype for tensor in tensors)
        #: Gradients that stay in the bucket after the pass.
        self._stays = as_they_are and keeps_views
        #: By place, True for gradients that are moved one by one.
        self.moves = [
            as_they_are and (on_cpu or keeps_views) and size * dtype.itemsize >= MOVED_BYTES
            for size in self._sizes
        ]
        self._large = [place for place, moved in enumerate(self.moves) if moved]
        self._leases: list[weakref.ref[Any] | None] = [None] * len(tensors)
        #: Moved gradients that the program made before the pass: they are copied back.
        self._outside: set[int] = set()
        self._memory: _Memory | None = None

    @property
    def flat(self) -> Tensor:
        """All gradients, one after the other."""
        return (self._memory or self._allocate()).flat

    @property
    def views(self) -> list[Tensor]:
        """A view of each gradient's part, in the gradient's shape."""
        return (self._memory or self._allocate()).views

    def _allocate(self) -> _Memory:
        first = self.tensors[0]
        if first.device.type == "cpu":
            flat = self._group.empty(self._offsets[-1], dtype=self.dtype)
        else:
            flat = first.new_empty(self._offsets[-1], dtype=self.dtype)
        with torch.no_grad():
            ranges = torch.split(flat, self._sizes)
            views = [grad_view(r, t) for r, t in zip(ranges, self.tensors, strict=True)]
        self._memory = _Memory(flat, views, list(map(Tensor.data_ptr, views)))
        self._leases = [None] * len(self.tensors)
        return self._memory

    def discard(self) -> None:
        """Let go of the memory: gradients or a reduction keep it; the next use allocates."""
        self._memory = None

    def open(self) -> None:
        """Let go of memory that holds gradients of an earlier pass. Local."""
        if self._keeps_views:
            known = self._memory
            if known and known.addresses != list(map(Tensor.data_ptr, known.views)):
                self.discard()  # a cast of the module gave the gradients, our views, other data
            return
        if not self._large:
            return
        self._outside.clear()
        held = False
        for place in self._large:
            grad = self.tensors[place].grad
            if grad is None:
                lease = self._leases[place]
                held = held or (lease is not None and lease() is not None)
            elif not self._is_inside(place, grad):
                self._outside.add(place)
        if held:
            inside = [p for p in self._large if self.tensors[p].grad is not None]
            self._outside.update(inside)
            self.discard()

    def _is_inside(self, place: int, grad: Tensor) -> bool:
        """True if ``grad`` already lies in the bucket's memory, at ``place``."""
        _, views, addresses = self._memory or self._allocate()
        if grad.layout is not _STRIDED or grad.data_ptr() != addresses[place]:
            return False
        view = views[place]
        at_place = not view.is_meta or address_of(grad) == address_of(view)
        return at_place and grad.stride() == view.stride()

    def move(self, place: int) -> None:
        """Copy a gradient of this pass into the bucket, and make the copy the gradient. Local."""
        tensor = self.tensors[place]
        grad = tensor.grad
        if grad is None or place in self._outside or grad.requires_grad or grad.is_sparse:
            return
        if self._is_inside(place, grad):
            return
        part = self._part(place)
        part.copy_(grad)
        tensor.grad = part

    def _part(self, place: int) -> Tensor:
        """A tensor on the part of one gradient: a view, or a tensor that keeps the memory alive."""
        flat, views, addresses = self._memory or self._allocate()
        view = views[place]
        if self._keeps_views or view.is_meta:
            return view
        memory: Any = (ctypes.c_char * view.nbytes).from_address(addresses[place])
        memory.owner = flat
        self._leases[place] = weakref.ref(memory)
        part = torch.frombuffer(memory, dtype=self.dtype)
        return part.as_strided_(view.shape, view.stride())

    @torch.no_grad()
    def fill(self, missing: Collection[int] = ()) -> list[int]:
        """Copy in gradients that lie elsewhere, and zeros for absent ones, which are returned."""
        views = self.views
        for place in missing:
            grad = self.tensors[place].grad
            if grad is not None and self._is_inside(place, grad):
                self.tensors[place].grad = grad.clone()
        sources, targets, absent, moves = [], [], [], self.moves
        for place, (grad, view) in enumerate(zip(map(_grad, self.tensors), views, strict=True)):
            if grad is None:
                view.zero_()
                absent.append(place)
            elif grad is not view and not (moves[place] and self._is_inside(place, grad)):
                sources.append(grad.to_dense() if grad.is_sparse else grad)
                targets.append(view)
        if targets:
            torch._foreach_copy_(targets, sources)
        return absent

    def hand_out(self, used: Sequence[bool] | None = None) -> None:
        """Make the averages the gradients, unless ``used`` is False at a place. Local."""
        targets, sources, stays, moves = [], [], self._stays, self.moves
        grads = map(_grad, self.tensors)
        for place, (grad, view) in enumerate(zip(grads, self.views, strict=True)):
            if used is not None and not used[place]:
                continue
            if stays:
                if grad is not view:  # a tensor may have been cast since forward
                    self.tensors[place].grad = view.to(grad_dtype_of(self.tensors[place]))
            elif grad is None or grad.layout is not _STRIDED:
                self.tensors[place].grad = self._new_grad(place)
            elif not (moves[place] and self._is_inside(place, grad)):
                targets.append(grad)
                sources.append(view)
        if targets:
            torch._foreach_copy_(targets, sources)

    def _new_grad(self, place: int) -> Tensor:
        if self.moves[place]:
            return self._part(place)
        return self.views[place].to(grad_dtype_of(self.tensors[place]), copy=True)
