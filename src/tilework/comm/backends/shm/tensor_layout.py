"""The places in torch's tensors of two facts that each operation needs: a bit and a number.

The bit says that a tensor's values are negated on reading (``torch.Tensor.is_neg``). The number is
the version counter, which autograd compares. A call of torch takes as long as a short operation. So
the core looks itself (csrc/python/tensors.h), at places that this module finds by looking at
tensors with known answers. If tensors do not look as expected, the core asks torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from typing import NamedTuple

import torch
from torch import Tensor

from tilework.optional_core import core as _core

_WORD_BYTES = ctypes.sizeof(ctypes.c_size_t)
#: The words to look at in the object behind a tensor; no torch has a smaller object.
_LOOKED_AT_WORDS = 22
#: Possible offsets of the number in a version counter, after the header of the class.
_COUNTER_OFFSETS = (8, 12, 16, 20, 24)


class TensorLayout(NamedTuple):
    """The places of the negation bit and the version number in torch's tensors: offsets in bytes,
    and the bit as a mask.
    """

    #: In a tensor's Python object: the address of the object behind it.
    impl: int
    #: In the object behind the tensor: the word with the negation bit.
    flags: int
    #: The negation bit, as a mask of that word.
    negative: int
    #: In the same object: the address of the version counter.
    counter: int
    #: In the version counter: the version number, of 32 bits.
    number: int


def find_tensor_layout() -> TensorLayout | None:
    """The layout of torch's tensors; None if they do not look as expected."""
    plain = _samples()
    negative = [torch._neg_view(tensor.detach()) for _ in range(3) for tensor in plain]
    # Later samples differ in addresses: objects that are made together share address bits.
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
    """The places of the bits that are set in all ``negative`` tensors and in no ``plain`` tensor:
    (offset of the word, mask).
    """
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
    """The places that may hold the tensor's version: (offset of a pointer in the tensor's object,
    offset of the version from there).
    """
    return {
        (at * _WORD_BYTES, offset)
        for at, address in enumerate(_words(tensor._cdata, _LOOKED_AT_WORDS))
        for offset in _COUNTER_OFFSETS
        if _number_at(address, offset) == tensor._version
    }


def _number_at(address: int, offset: int) -> int | None:
    """The 32-bit number at an address; None if the kernel says that no memory is there."""
    if address == 0 or address % _WORD_BYTES:
        return None
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        try:
            data = os.pread(memory.fileno(), 4, address + offset)
        except (OSError, OverflowError):
            return None
    return int.from_bytes(data, sys.byteorder) if len(data) == 4 else None


def _finds_what_torch_says() -> bool:
    """True if the core, with the layout it was given, agrees with torch on the negation and version
    of further tensors.
    """
    imaginary = torch.zeros(3, dtype=torch.complex64).conj().imag
    tensors = [torch.ones(5), torch.ones(2, 3)[:, 1:], imaginary, torch._neg_view(torch.ones(1))]
    for tensor in tensors:
        before = tensor._version
        _core.bump_version(tensor)
        if tensor._version != before + 1 or _core.is_negative(tensor) != tensor.is_neg():
            return False
    return True


def tell_core() -> bool:
    """Give the core the layout of torch's tensors. False if that cannot work: the core then asks
    torch. Call after register_torch.
    """
    # If this torch lacks a name that is used here, the core asks torch.
    with contextlib.suppress(AttributeError, OSError, RuntimeError, TypeError):
        layout = find_tensor_layout()
        if layout is not None:
            _core.set_tensor_layout(*layout)
            if _finds_what_torch_says():
                return True
    _core.set_tensor_layout(0, 0, 0, 0, 0)
    return False
