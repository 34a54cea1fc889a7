"""Objects as bytes: pickle, with the memory of tensors and arrays apart from it.

A tensor on the CPU is a few numbers in the pickle, and one buffer of exactly the elements; the rest
of the storage does not travel. As in torch, a tensor that arrives has no history: it is a leaf,
which requires grad if the sender's did. References (RRef) are apart as well, since the receiver
must count them whether or not it reads the pickle.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from tilework.comm.per_call.internal import in_library
from tilework.errors import DistError, RemoteError, text_of
from tilework.memory_files import MemoryFile
from tilework.rpc.message import NEW, NO_FILE, File, MessageKind, Ref, RpcMessage, encode
from tilework.rpc.references import Owned, References
from tilework.rpc.rref import RRef
from tilework.rpc.shared_buffers import LEAST_BYTES, SharedBufferPool, place
from tilework.rpc.transport import Transport
from tilework.rpc.workers import WorkerInfo


class RemoteTraceback(Exception):
    """Another rank's traceback: the cause of an exception that has no message to append it to."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class RemoteFailure(NamedTuple):
    """An exception, as it is sent to another rank."""

    pickled: bytes | None
    """The exception; None where it cannot be pickled, or is not for others (an interrupt)."""
    name: str
    text: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> RemoteFailure:
        lines = traceback.format_exception(type(error), error, _users(error.__traceback__))
        name = f"{type(error).__module__}.{type(error).__qualname__}"
        return cls(_pickled(error), name.removeprefix("builtins."), text_of(error), "".join(lines))

    def rebuild(self, where: WorkerInfo) -> BaseException:
        """The exception to raise on the calling rank: a RemoteError if it cannot be rebuilt."""
        text = f"On worker {where.name!r} (rank {where.id}):\n{self.traceback}"
        error = _unpickled(self.pickled)
        if error is None:
            error = RemoteError(f"{self.name}: {self.text}\n\n{text}")
        elif len(error.args) == 1 and error.args[0] == text_of(error):
            error.args = (f"{error.args[0]}\n\n{text}",)
        else:
            error.__cause__ = RemoteTraceback(text)
        return error


def _users(frame: TracebackType | None) -> TracebackType | None:
    """The traceback from the user's function on, without this library's frames above that."""
    first = frame
    while frame is not None and in_library[frame.tb_frame.f_code.co_filename]:
        frame = frame.tb_next
    return frame or first


def _pickled(error: BaseException) -> bytes | None:
    if not isinstance(error, Exception):
        return None
    try:
        data = pickle.dumps(error)
    except Exception:
        return None
    return data if _unpickled(data) is not None else None


def _unpickled(data: bytes | None) -> Exception | None:
    try:
        error = None if data is None else pickle.loads(data)
    except Exception:
        return None
    return error if isinstance(error, Exception) else None


#: Smaller buffers are copied into the pickle.
_APART_BYTES: Final = 4 << 10


def dump(obj: Any, refer: Callable[[RRef[Any]], None]) -> list[memoryview]:
    """The pickle of an object, and large buffers; ``refer`` is called with each RRef in it."""
    buffers: list[memoryview] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < _APART_BYTES:
            return True
        buffers.append(view)
        return False

    file = io.BytesIO()
    try:
        _Pickler(file, keep, refer).dump(obj)
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
        raise TypeError(
            f"an object cannot be sent to another rank: {error}. Functions and classes travel by "
            f"name: define them at the top of a module that all ranks can import"
        ) from error
    return [memoryview(file.getvalue()), *buffers]


def load(data: memoryview, buffers: Sequence[Any], refs: Sequence[RRef[Any]]) -> Any:
    """The object whose pickle is ``data``, with the buffers and references that stand apart."""
    if refs:
        return _Unpickler(io.BytesIO(data), buffers, refs).load()
    return pickle.loads(data, buffers=buffers)


class _Pickler(pickle.Pickler):
    def __init__(
        self,
        file: io.BytesIO,
        keep: Callable[[pickle.PickleBuffer], bool],
        refer: Callable[[RRef[Any]], None],
    ) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL, buffer_callback=keep)
        self._refer = refer
        self._refs = 0

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is Tensor and _is_plain(obj):
            return _reduce_tensor(obj)
        if kind is RRef:
            self._refer(obj)
            self._refs += 1
            return _nth_ref, (self._refs - 1,)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, buffers: Sequence[Any], refs: Sequence[RRef[Any]]) -> None:
        super().__init__(file, buffers=buffers)
        self._refs = refs

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, _nth_ref.__name__):
            return self._refs.__getitem__
        return super().find_class(module, name)


def _nth_ref(number: int) -> RRef[Any]:
    """Placeholder in a pickle for the RRef number ``number`` of the message."""
    raise pickle.UnpicklingError("an RRef can be loaded only with the message that it came in")


def _is_plain(tensor: Tensor) -> bool:
    """True if ``tensor`` is dense, on the CPU, not quantized, and without Python attributes."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and not tensor.__dict__
    )


def _reduce_tensor(tensor: Tensor) -> Any:
    plain = tensor.detach().resolve_conj().resolve_neg()
    if not plain.is_contiguous():
        plain = plain.clone()  # the elements alone, in their order where they have no gaps
    size, buffer = plain.nbytes, None
    if size:
        memory = (ctypes.c_char * size).from_address(plain.data_ptr())
        memory.tensor = plain  # type: ignore[attr-defined]  # as long as anyone reads it
        buffer = pickle.PickleBuffer(memory)
    shape = (tuple(plain.shape), plain.stride())
    return _make_tensor, (buffer, plain.dtype, *shape, tensor.requires_grad)


def _make_tensor(
    buffer: Any,
    dtype: torch.dtype,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> Tensor:
    if buffer is None:
        tensor = torch.empty_strided(size, stride, dtype=dtype)
    else:
        tensor = torch.frombuffer(buffer, dtype=dtype)
        if tensor.data_ptr() % dtype.itemsize:
            tensor = tensor.clone()
        tensor = tensor.as_strided(size, stride)
    return tensor.requires_grad_() if requires_grad else tensor


class Sender:
    """Sends the messages of a rank. Never blocks."""

    def __init__(
        self,
        rank: int,
        transport: Transport,
        shared_buffers: SharedBufferPool,
        probes: Sequence[MemoryFile],
    ) -> None:
        self._rank, self._transport = rank, transport
        self._shared_buffers, self._probes = shared_buffers, probes
        self.references = References(rank, self.notify, transport.wake)
        #: Ranks that can open this one's memory files.
        self.readers: set[int] = set()

    def pack(self, obj: Any, to: int, new: Ref | None = None) -> tuple[list[memoryview], list[Ref]]:
        """Pickle ``obj`` for rank ``to``; return the parts, and the references in it, counted.

        ``new`` is a reference in ``obj`` to a value that ``to`` is to make, if there is any.
        """
        refs: list[Ref] = []

        def refer(rref: RRef[Any]) -> None:
            if rref.agent.references is not self.references:
                raise ValueError(f"{rref!r} is of an RPC that was shut down")
            if new is not None and rref.entry.id == new.id:
                refs.append(new)
            else:
                refs.append(self.references.outgoing(rref.entry, to))

        try:
            return dump(obj, refer), refs
        except BaseException:
            self.references.unsent(refs, to)
            raise

    def post(
        self, kind: MessageKind, to: int, number: int, parts: list[memoryview], refs: list[Ref]
    ) -> bool:
        """Send a message with a body to rank ``to``; False if that rank is gone."""
        file, places = self._share(to, parts)
        sent = self._transport.send(to, encode(kind, self._rank, number, refs, parts, file, places))
        if not sent:
            self._shared_buffers.taken(file.number)
            self.references.unsent(refs, to)
        return sent

    def _share(self, to: int, parts: Sequence[memoryview]) -> tuple[File, list[int]]:
        """Write large parts to a memory file for ``to``; (the file, parts' offsets or -1)."""
        sizes = [part.nbytes for part in parts]
        large = [i for i, size in enumerate(sizes) if size >= LEAST_BYTES]
        if not large or to not in self.readers:
            return NO_FILE, []
        offsets = place([sizes[i] for i in large])
        shared = self._shared_buffers.share(to, [parts[i] for i in large], offsets)
        if shared is None:
            return NO_FILE, []
        places = [-1] * len(parts)
        for i, offset in zip(large, offsets, strict=True):
            places[i] = offset
        return File(*shared), places

    def notify(self, kind: MessageKind, to: int, number: int, refs: Sequence[Ref] = ()) -> None:
        """Send a message without a body to rank ``to``; do nothing if that rank is gone."""
        self._transport.send(to, encode(kind, self._rank, number, refs))

    def hello(self, to: int) -> bytes:
        """The first message to rank ``to``: can this rank open the memory files of ``to``?"""
        return b"".join(encode(MessageKind.HELLO, self._rank, int(self._probes[to].is_reachable())))


@dataclass(slots=True, eq=False)
class Received:
    """A message whose references are counted and whose memory file is mapped.

    The pickle is not read yet: reading it may run code that takes long or fails.
    """

    message: RpcMessage
    refs: list[RRef[Any]]
    file: Any
    """The contents of the memory file; the error if that cannot be opened; None without a file."""

    @property
    def lacks_memory(self) -> bool:
        return isinstance(self.file, OSError)

    def load(self) -> Any:
        if self.lacks_memory:
            raise DistError(f"cannot open the sender's memory: {self.file}")
        data, *buffers = self.message.load(self.file)
        return load(data, buffers, self.refs)

    def fail_new(self, error: BaseException) -> None:
        for rref, ref in zip(self.refs, self.message.refs, strict=True):
            if ref.pin == NEW and isinstance(rref.entry, Owned):
                rref.entry.fail(error)
