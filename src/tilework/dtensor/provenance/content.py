"""Hashes of tensors' elements, of all or of a sample."""

from __future__ import annotations

import ctypes
from hashlib import blake2b

import torch
from torch import Tensor

from tilework.comm.per_call.internal import awaited
from tilework.dtensor.provenance.mode import mode

try:
    from tilework import _core
except ImportError:  # installed without the core
    _core = None  # type: ignore[assignment]

#: Of larger tensors a sample is hashed.
_ALL_BYTES = 64 << 10
_SAMPLES = 1024
_HAVE_MEMORY = ("cpu", "cuda", "xpu", "mps")
_PLAIN = (Tensor, torch.nn.Parameter)
_is_transformed = torch._C._functorch.is_functorch_wrapped_tensor


def content_digest(tensor: Tensor) -> int:
    """A hash of the elements, as far as the mode says; 0 where nothing is hashed. Local.

    Tensors on accelerators are hashed in the full mode only: that waits for the device.
    """
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
