"""The places in torch's tensors of two facts that each operation needs: a bit and a number.

Whether a tensor's values are to be negated when they are read (``torch.Tensor.is_neg``), and its
version counter, which autograd compares. Asking torch takes as long as a short operation; the core
looks itself (csrc/python/tensors.h), at places that are found here by looking at tensors for which
the answers are known. Where tensors do not look as expected, it asks torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from typing import NamedTuple

import torch
from torch import Tensor

try:
    from tilework import _core
except ImportError:  # installed without the core
    _core = None  # type: ignore[assignment]

_WORD_BYTES = ctypes.sizeof(ctypes.c_size_t)
#: Of the object behind a tensor, which is no smaller in any torch.
_LOOKED_AT_WORDS = 22
#: In a version counter, after what its class begins with.
_COUNTER_OFFSETS = (8, 12, 16, 20, 24)


class TensorLayout(NamedTuple):
    """Offsets in bytes, and a bit as a mask."""

    #: In a tensor's Python object: the address of the object behind it.
    impl: int
    #: In the object behind it: the word with the bit that says that it is to be negated.
    flags: int
    negative: int
    #: In the same: the address of the version counter, and there the number, of 32 bits.
    counter: int
    number: int


def find_layout() -> TensorLayout | None:
    """The layout of torch's tensors; None if they do not look as expected."""
    plain = _samples()
    negative = [torch._neg_view(tensor.detach()) for _ in range(3) for tensor in plain]
    # Others are made after these: bits of addresses are alike in what was made at one time.
    others = [tensor for _ in range(3) for tensor in _samples()]
    impl = _only(set.intersection(*(_places_of_impl(tensor) for tensor in plain + negative)))
    flag = _only(_differences(plain + others, negative))
    counter = _only(set.intersection(*map(_places_of_version, plain)))
    if impl is None or flag is None or counter is None:
        return None
    return TensorLayout(impl[0], *flag, *counter)


def _samples() -> list[Tensor]:
    """Tensors of several kinds, with different versions."""
    samples = [
        torch.zeros(()),
        torch.zeros(3, dtype=torch.int64),
        torch.nn.Parameter(torch.zeros(2, 2)),
        torch.zeros(2, requires_grad=True) * 2,
        torch.zeros(4, dtype=torch.bfloat16)[1:],
        torch.zeros(6).view(2, 3).t(),
    ]
    with torch.no_grad():
        for number, tensor in enumerate(samples, start=3):
            for _ in range(7 * number):
                tensor.zero_()
    return samples


_Place = tuple[int, int]


def _only(places: set[_Place]) -> _Place | None:
    return places.pop() if len(places) == 1 else None


def _words(address: int, count: int) -> list[int]:
    return list((ctypes.c_size_t * count).from_address(address))


def _places_of_impl(tensor: Tensor) -> set[_Place]:
    words = _words(id(tensor), type(tensor).__basicsize__ // _WORD_BYTES)
    return {(at * _WORD_BYTES, 0) for at, word in enumerate(words) if word == tensor._cdata}


def _differences(plain: list[Tensor], negative: list[Tensor]) -> set[_Place]:
    """The bits of all the second and none of the first: the word's offset, the bit as a mask."""
    without, having = (
        list(zip(*(_words(tensor._cdata, _LOOKED_AT_WORDS) for tensor in tensors), strict=True))
        for tensors in (plain, negative)
    )
    return {
        (at * _WORD_BYTES, 1 << bit)
        for at, (some, all_) in enumerate(zip(without, having, strict=True))
        for bit in range(8 * _WORD_BYTES)
        if all(word >> bit & 1 for word in all_) and not any(word >> bit & 1 for word in some)
    }


def _places_of_version(tensor: Tensor) -> set[_Place]:
    """Offsets of the address of a number which is the version, and the number's own."""
    return {
        (at * _WORD_BYTES, offset)
        for at, address in enumerate(_words(tensor._cdata, _LOOKED_AT_WORDS))
        for offset in _COUNTER_OFFSETS
        if _number_at(address, offset) == tensor._version
    }


def _number_at(address: int, offset: int) -> int | None:
    """The number of 32 bits there; None if there is no memory, says the kernel, which reads it."""
    if address == 0 or address % _WORD_BYTES:
        return None
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        try:
            data = os.pread(memory.fileno(), 4, address + offset)
        except (OSError, OverflowError):
            return None
    return int.from_bytes(data, sys.byteorder) if len(data) == 4 else None


def _finds_what_torch_says() -> bool:
    """True if the core's answers are torch's, for tensors that it was not found by."""
    imaginary = torch.zeros(3, dtype=torch.complex64).conj().imag
    tensors = [torch.ones(5), torch.ones(2, 3)[:, 1:], imaginary, torch._neg_view(torch.ones(1))]
    for tensor in tensors:
        before = tensor._version
        _core.bump_version(tensor)
        if tensor._version != before + 1 or _core.is_negative(tensor) != tensor.is_neg():
            return False
    return True


def tell_core() -> bool:
    """Let the core look at tensors itself; False if it has to ask torch. After register_torch."""
    # A torch without one of the names used here is asked.
    with contextlib.suppress(AttributeError, OSError, RuntimeError, TypeError):
        layout = find_layout()
        if layout is not None:
            _core.set_tensor_layout(*layout)
            if _finds_what_torch_says():
                return True
    _core.set_tensor_layout(0, 0, 0, 0, 0)
    return False
