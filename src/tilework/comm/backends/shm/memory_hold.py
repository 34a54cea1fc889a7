"""Holds on tensors' memory during an operation, also when a storage gets other memory.

An asynchronous operation keeps the tensors that it reads and writes alive. That keeps a storage,
but not the storage's memory: torch frees the memory as soon as the storage gets other memory, by
``resize_``, by ``share_memory_``, or on the way to another process. So the core holds the memory
itself (csrc/python/memory_hold.h) until the operation is done, and then copies results to the
storage's new memory. torch has no call for this. The place of the memory in torch's storage objects
is found at import, by looking at samples, and tried. If storages look different (another torch),
or without the core, nothing is held.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilework.comm.backends.tensor_memory import as_bytes, unseen
from tilework.comm.forms import Operation, Parts
from tilework.optional_core import core as _core

_WORD_BYTES = ctypes.sizeof(ctypes.c_void_p)
#: The words of torch's storage object to look at. Every torch has a longer object.
_LOOKED_AT_WORDS = 9


class HeldMemory:
    """The memory of an operation's tensors, of which contiguous tensors are written, held from
    construction until :meth:`release`.
    """

    __slots__ = ("_hold",)

    def __init__(self, tensors: Iterable[Tensor], written: Sequence[Tensor]) -> None:
        storages = [tensor.untyped_storage() for tensor in tensors if tensor.is_cpu]
        spans = [(t.untyped_storage()._cdata, t.data_ptr(), t.nbytes) for t in written if t.is_cpu]
        self._hold = _core.MemoryHold(storages, spans)

    def copy_to_moved(self) -> None:
        """Copy results from held memory to the new memory of storages that have moved, as far as
        the new memory is large enough.
        """
        self._hold.copy_to_moved()

    def release(self) -> None:
        """End the hold, which frees memory that no storage uses any more. Idempotent."""
        self._hold.release()


def hold_memory(tensors: Iterable[Tensor], written: Sequence[Tensor]) -> HeldMemory | None:
    """Hold the memory of the CPU tensors among ``tensors``; None if memory cannot be held, with
    this torch or without the core.
    """
    return HeldMemory(tensors, written) if IS_AVAILABLE else None


def hold_operation(
    operation: Operation, only_read: bool, takes_addresses: bool
) -> HeldMemory | None:
    """Hold the memory of all CPU tensors of an operation, which may only read; None if memory
    cannot be held, with this torch or without the core.

    Unless the engine ``takes_addresses`` at the call, it may read them later, and the tensors in
    the operation are replaced by tensors at the held memory.
    """
    if not IS_AVAILABLE:
        return None
    outputs = operation.outputs
    written = [outputs] if isinstance(outputs, Tensor) else outputs
    hold = HeldMemory(operation.tensors(), () if only_read else written)
    if not takes_addresses:
        operation.inputs = _at_held_addresses(operation.inputs)
        operation.outputs = _at_held_addresses(operation.outputs)
    return hold


def _at_held_addresses(parts: Parts) -> Parts:
    if isinstance(parts, Tensor):
        return at_held_address(parts)
    return [at_held_address(part) for part in parts]


def fits_storage(tensor: Tensor) -> bool:
    """True if the tensor's elements lie within the storage, which may have shrunk."""
    if tensor.numel() == 0:
        return True
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    end = tensor.storage_offset() + last + 1
    return end * tensor.itemsize <= tensor.untyped_storage().nbytes()


@unseen
def at_held_address(tensor: Tensor) -> Tensor:
    """A tensor that stays at the present memory of ``tensor``, which must be contiguous; both share
    values.

    ``tensor`` itself would lead a later reader to other memory if the storage got other memory.
    """
    if not tensor.is_cpu or tensor.nbytes == 0:
        return tensor
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


class StorageLayout(NamedTuple):
    """Offsets in bytes of three words in torch's storage objects, and the address of the function
    that frees memory.
    """

    #: The word with the address of the memory.
    data: int
    #: The word with the argument of the function that frees memory: the address again.
    context: int
    #: The word with the function that frees memory.
    deleter: int
    #: The address of torch's own function in that word.
    free_memory: int


def find_storage_layout() -> StorageLayout | None:
    """The layout of torch's storages; None if they do not look as expected.

    Expected are three words in a row: the memory's address, and in either order the function that
    frees memory and the function's argument, which is the address again.
    """
    samples = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in (8, 24, 4096)]
    layouts = {_layout_of(sample.untyped_storage()) for sample in samples}
    layout = layouts.pop()
    borrowed = torch.frombuffer(bytearray(8), dtype=torch.uint8).untyped_storage()
    if layouts or layout is None or layout.free_memory == 0:
        return None
    words = _words_of(borrowed)
    same_data = words[layout.data // _WORD_BYTES] == borrowed.data_ptr()
    same_deleter = words[layout.deleter // _WORD_BYTES] == layout.free_memory
    return layout if same_data and not same_deleter else None


def _layout_of(storage: torch.UntypedStorage) -> StorageLayout | None:
    words, address = _words_of(storage), storage.data_ptr()
    places = [at for at, word in enumerate(words) if word == address]
    if len(places) != 2 or places[1] - places[0] not in (1, 2):
        return None
    data, context = places
    deleter = data + 1 if context == data + 2 else data + 2
    return StorageLayout(
        data * _WORD_BYTES, context * _WORD_BYTES, deleter * _WORD_BYTES, words[deleter]
    )


def _words_of(storage: torch.UntypedStorage) -> list[int]:
    return list((ctypes.c_size_t * _LOOKED_AT_WORDS).from_address(storage._cdata))


def _is_held() -> bool:
    """Try a hold: True if memory keeps the values after the storage got other memory."""
    tensor = torch.arange(1000)
    bytes_before, address = as_bytes(tensor).tolist(), tensor.data_ptr()
    held = HeldMemory([tensor], [tensor])
    storage = tensor.untyped_storage()
    storage.resize_(8 * storage.nbytes())
    others = [torch.zeros(1000, dtype=torch.int64) for _ in range(4)]  # would reuse freed memory
    kept = list(ctypes.string_at(address, len(bytes_before))) == bytes_before
    reused = any(other.data_ptr() == address for other in others)
    tensor.zero_()  # writes the new memory
    held.copy_to_moved()
    copied = as_bytes(tensor).tolist() == bytes_before
    held.release()
    return kept and copied and not reused


def _make_available() -> bool:
    if _core is None:
        return False
    # If this torch lacks a name that is used here, nothing is held.
    with contextlib.suppress(AttributeError, RuntimeError, TypeError):
        layout = find_storage_layout()
        if layout is not None:
            _core.set_storage_layout(*layout)
            if _is_held():
                return True
            _core.set_storage_layout(0, 0, 0, 0)
    return False


#: True if memory can be held.
IS_AVAILABLE = _make_available()
