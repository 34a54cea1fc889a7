"""Hashes of tensors' elements, of all or of a sample."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from typing import Literal, get_args

import torch
from torch import Tensor

from tilework.comm.per_call.internal import awaited
from tilework.comm.provenance_digest import VARIABLE
from tilework.comm.world import current_world
from tilework.optional_core import core as _core

Mode = Literal["off", "sampled", "full"]
_MODES = get_args(Mode)

#: The number of ``verifying`` that are open, of all ranks of this process.
_open = 0
#: The number of times that a mode began or ended: a hash from before may differ from a new hash.
changes = 0
_lock = threading.Lock()


@dataclass(eq=False)
class _Chosen:
    """The open ``verifying`` of one rank, innermost last."""

    modes: list[Mode] = field(default_factory=list)


@cache
def _default() -> Mode:
    text = os.environ.get(VARIABLE) or "sampled"
    return _checked(text, f"the environment variable {VARIABLE}")


def _checked(text: str, what: str) -> Mode:
    for mode in _MODES:
        if mode == text:
            return mode  # type: ignore[no-any-return]
    raise ValueError(f"{what} must be one of {', '.join(_MODES)}, got {text!r}")


def mode() -> Mode:
    """The mode of this rank: that of the innermost ``verifying``, else of the environment."""
    if _open:
        modes = current_world().state(_Chosen).modes
        if modes:
            return modes[-1]
    return _default()


@contextmanager
def verifying(mode: Mode) -> Iterator[None]:
    """Set how thoroughly ranks are compared within the context. Local; open it on all ranks.

    ``"off"`` compares nothing. ``"sampled"``, the default, hashes a sample of large tensors, and
    compares parameters at every fourth step of an optimizer up to the 64th, later at every 16th, or
    at every 64th if steps take less than two milliseconds. ``"full"`` hashes every element, and
    compares parameters at each step. The environment variable ``TILEWORK_VERIFY`` sets the mode for
    the whole program.

    Args:
        mode: ``"off"``, ``"sampled"`` or ``"full"``.

    Raises:
        ValueError: The mode is none of these.

    Example:
        >>> with verifying("full"):
        ...     print(mode())
        full
    """
    checked = _checked(mode, "the mode of verifying()")
    modes = current_world().state(_Chosen).modes
    modes.append(checked)
    _count(1)
    try:
        yield
    finally:
        _count(-1)
        modes.pop()


def _count(more: int) -> None:
    global _open, changes
    with _lock:
        _open += more
        changes += 1


#: Of larger tensors a sample is hashed.
_ALL_BYTES = 64 << 10
_SAMPLES = 1024
_HAVE_MEMORY = ("cpu", "cuda", "xpu", "mps")
_PLAIN = (Tensor, torch.nn.Parameter)
_is_transformed = torch._C._functorch.is_functorch_wrapped_tensor


def content_digest(tensor: Tensor) -> int:
    """A hash of the elements, as far as the mode says; 0 where nothing is hashed. Local."""
    how = mode()
    if how == "off" or (not tensor.is_cpu and how != "full"):
        return 0
    return hash_of(tensor, how == "full")


def hash_of(tensor: Tensor, full: bool = True) -> int:
    """A hash of the elements in row-major order; if not ``full``, of a sample of many elements.

    The hash is equal for equal elements, whatever the strides. It is 0 for tensors without memory,
    and for tensors that are not dense.

    Example:
        >>> x = torch.arange(6.0)
        >>> hash_of(x) == hash_of(x.view(3, 2).T.clone().T), hash_of(x) == hash_of(x + 1)
        (True, False)
    """
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return _hash_of_other(tensor, full)
    if tensor.__class__ not in _PLAIN or not tensor.is_cpu or _core is None:
        return _hash_of_other(tensor, full)
    nbytes = tensor.nbytes
    if nbytes and not _address(tensor):  # autograd's zeros, or freed
        return hash_of(tensor.detach().clone(), full) if tensor._is_zerotensor() else 0
    if not full and nbytes > _ALL_BYTES:
        shape, strides = tensor.shape, tensor.stride()
        return _core.hash_samples(_address(tensor), shape, strides, tensor.itemsize, _SAMPLES)
    if not tensor.is_contiguous():
        tensor = tensor.detach().contiguous()
    return _core.hash_content(_address(tensor), nbytes)


def _address(tensor: Tensor) -> int:
    try:
        address = tensor.data_ptr()
    except RuntimeError:
        if not _is_transformed(tensor):
            raise
        address = 0
    if not address and _is_transformed(tensor):  # functionalize gives tensors the address 0
        raise RuntimeError(
            "torch.func's transforms (vmap, grad, vjp, jacrev, functionalize) take no DTensors, "
            "and a function within one met a DTensor of its surroundings: transform a function "
            "of plain tensors, from to_local() or full_tensor()"
        )
    return address


def _hash_of_other(tensor: Tensor, full: bool) -> int:
    """The hash of a tensor that the core cannot read as it is."""
    if (wrapped := awaited(tensor)) is not tensor:
        return hash_of(wrapped, full)
    if tensor.layout is not torch.strided or tensor.device.type not in _HAVE_MEMORY:
        return 0
    try:
        if not tensor.data_ptr():  # empty, or a wrapper of others, such as torch's DTensor
            return 0
    except RuntimeError:  # a traced tensor in torch 2.6: the next operator raises a clearer error
        return 0
    with torch.no_grad():
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if tensor.__class__ not in _PLAIN:
            tensor = tensor.as_subclass(Tensor)
        if not full and tensor.nbytes > _ALL_BYTES and not (tensor.is_cpu and _core):
            tensor = sample(tensor, _SAMPLES)
        tensor = tensor.cpu()
    if _core is not None:
        return hash_of(tensor, full)
    # Not by way of numpy, after which the memory could not be resized any more.
    tensor = tensor.contiguous()
    raw = ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.numel() else b""
    return int.from_bytes(blake2b(raw, digest_size=8).digest(), "little")


def sample(tensor: Tensor, count: int) -> Tensor:
    """At most ``count`` elements, evenly spaced in row-major order, as a tensor of one dim."""
    gaps, last = count - 1, tensor.numel() - 1
    if last <= gaps:
        return tensor.reshape(-1)
    places = [last // gaps * i + last % gaps * i // gaps for i in range(count)]
    with torch.no_grad():
        return torch.take(tensor, torch.tensor(places, device=tensor.device))
