"""The memory under an operation's tensors: made contiguous, and checked for sharing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from itertools import pairwise
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from tilework.comm.forms import MANY_INPUTS, MANY_OUTPUTS, Operation, Parts

P = ParamSpec("P")
T = TypeVar("T")

#: The first address, and the end address (exclusive).
Span = tuple[int, int]


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes; shares the memory."""
    # A contiguous tensor may have any stride along a dim of one element, also after view(-1).
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def unseen(function: Callable[P, T]) -> Callable[P, T]:
    """Hide operators of ``function`` from the program's modes: one rank may compute for all."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            return function(*args, **kwargs)

    return call


@unseen
def plain(tensor: Tensor, as_real: bool = True) -> Tensor:
    """The values in contiguous memory, resolved; complex numbers as pairs if ``as_real``."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if as_real and tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.contiguous()


@unseen
def stand_in(tensor: Tensor, operation: Operation, as_real: bool = True) -> Tensor:
    """``tensor`` if ``operation`` can write to it, else contiguous memory to copy back."""
    memory = tensor.detach()
    if not memory.is_contiguous() or memory.is_conj() or memory.is_neg():
        if _overlaps(tensor):
            raise ValueError(
                f"cannot write to a tensor of shape {list(tensor.shape)} and strides "
                f"{list(tensor.stride())}, whose elements share memory; pass its clone()"
            )
        memory = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        operation.copy_back.append((tensor.detach(), memory))
    return torch.view_as_real(memory) if as_real and memory.is_complex() else memory


def _overlaps(tensor: Tensor) -> bool:
    """True if two elements of ``tensor`` have the same address."""
    if tensor.numel() == 0:
        return False
    dims = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    reach, nested = 0, True
    for stride, size in dims:
        nested = nested and stride > reach  # each step leads past all elements of the inner dims
        reach += stride * (size - 1)
    if nested:
        return False
    if any(stride == 0 for stride, _ in dims) or tensor.numel() > reach + 1:
        return True
    # Interleaved strides, such as 2 and 3, have no cheap formula, and are rare.
    addresses = torch.zeros((), dtype=torch.int64)
    for stride, size in dims:
        addresses = addresses.unsqueeze(-1) + torch.arange(size) * stride
    return len(set(addresses.flatten().tolist())) < tensor.numel()


def rows(tensor: Tensor, splits: Sequence[int] | None) -> Parts:
    """``tensor`` split into rows for each rank; without splits itself, for equal parts."""
    return unseen(torch.split)(tensor, list(splits)) if splits else tensor


def check_overlaps(operation: Operation, rank: int, size: int) -> None:
    """Refuse (ValueError) outputs that share memory with each other or with inputs.

    Exactly in place, an output is the input of the same rank, which the operation reads before.
    """
    device = operation.device
    outputs = _spans(operation.outputs, operation.kind in MANY_OUTPUTS, size)
    if not outputs or (device is not None and device.type == "meta"):  # without addresses
        return
    if len(outputs) > 1 and not isinstance(operation.outputs, Tensor):
        _check_outputs(operation, outputs)
    inputs = _spans(operation.inputs, operation.kind in MANY_INPUTS, size)
    if not inputs or not _overlap(_hull(inputs), _hull(outputs)):
        return
    for i, source in enumerate(inputs):
        for o, target in enumerate(outputs):
            in_place = source == target and _belong_together(i, o, inputs, outputs, rank)
            if _overlap(source, target) and not in_place:
                raise ValueError(
                    f"an input and an output of {operation.title or operation.kind} overlap in "
                    f"memory without being the same part; pass a clone() of the input"
                )


def _check_outputs(operation: Operation, outputs: list[Span]) -> None:
    ordered = sorted(span for span in outputs if span[0] < span[1])
    # Strided tensors may interleave; if they begin at one address, they share that element.
    strided = [tensor.data_ptr() for tensor, _ in operation.copy_back if tensor.numel()]
    begins = {*strided, *(begin for begin, _ in ordered)}
    if len(begins) < len(strided) + len(ordered) or any(
        low[1] > high[0] for low, high in pairwise(ordered)
    ):
        raise ValueError(
            f"outputs of {operation.title or operation.kind} overlap in memory, so that one "
            f"result would overwrite another; give each its own memory"
        )


def _belong_together(i: int, o: int, inputs: list[Span], outputs: list[Span], rank: int) -> bool:
    """True if input ``i`` and output ``o`` are of one rank; a single part is of this ``rank``."""
    return (i if len(inputs) > 1 else rank) == (o if len(outputs) > 1 else rank) or (
        len(inputs) == len(outputs) == 1
    )


def _spans(parts: Parts, many: bool, size: int) -> list[Span]:
    if not isinstance(parts, Tensor):
        return [(part.data_ptr(), part.data_ptr() + part.nbytes) for part in parts]
    start, share = parts.data_ptr(), parts.nbytes // (size if many else 1)
    count = size if many else 1
    return [(start + k * share, start + (k + 1) * share) for k in range(count)]


def _hull(spans: list[Span]) -> Span:
    full = [span for span in spans if span[0] < span[1]]
    return (min(s[0] for s in full), max(s[1] for s in full)) if full else (0, 0)


def _overlap(a: Span, b: Span) -> bool:
    return max(a[0], b[0]) < min(a[1], b[1])
