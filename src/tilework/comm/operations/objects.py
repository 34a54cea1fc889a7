"""Collectives on Python objects, by pickle.

Pickle runs code of the sender's choice, so these functions work only in groups whose ranks are
known to belong to the job (shm and threads always; torch's engines if the store has the job's
secret, as under ``tilework run``). With ``weights_only=True`` they accept data from anyone, but
only plain data and tensors. See docs/decisions/0004-pickle.md.

The functions are collective like those of :mod:`.collectives`; all block. Objects must be
picklable; ranks receive copies. If a rank cannot pickle the objects that it sends, or gives a list
of another length than the group needs, all ranks that take part raise, and the group stays usable.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup
from tilework.comm.operations import collectives, p2p
from tilework.comm.per_call import checks
from tilework.comm.world import AnyGroup, current_world, member
from tilework.errors import DistBackendError, text_of

#: The types that the restricted loader builds, besides numbers, strings, bytes and containers.
_PLAIN = {
    "collections": ("OrderedDict", "deque", "Counter"),
    "datetime": ("date", "datetime", "timedelta"),
    "builtins": ("complex", "set", "frozenset", "bytearray", "slice", "range"),
    "torch": ("Size", "device"),
    "torch._utils": ("_rebuild_tensor_v2", "_rebuild_parameter"),
}

#: The name of an error's class, and the error's text.
Report = tuple[str, str]
#: Pickles of objects or reports of an error, and the error.
_Pickles = tuple[list[Tensor], Exception | None]
#: The beginning of a report; no pickle begins so.
_FAILED = b"failed"

#: Error classes that every rank raises unchanged; other errors become a RuntimeError on other
#: ranks.
_KINDS = (
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.PicklingError,
)


def report_of(error: BaseException) -> Report:
    """A report of ``error`` for other ranks, as plain data."""
    # The most derived first: NotImplementedError is a RuntimeError.
    kinds = [kind for kind in _KINDS if isinstance(error, kind)]
    kind = min(kinds, key=lambda kind: -len(kind.__mro__), default=RuntimeError)
    return kind.__name__, text_of(error)


def raise_report(rank: int, report: Report) -> NoReturn:
    """Raise an error of the class in ``report``, which names ``rank``."""
    name, text = report
    raise next(kind for kind in _KINDS if kind.__name__ == name)(f"rank {rank}: {text}")


class _PlainUnpickler(pickle.Unpickler):
    """Builds plain data and tensors, and runs nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda data: torch.load(io.BytesIO(data), weights_only=True)
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _PLAIN.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"{module}.{name} is refused with weights_only=True, which accepts plain data and "
            f"tensors; send those, or trust the senders and leave weights_only out"
        )


def _dump(pg: ProcessGroup, count: int, make: Callable[[], Sequence[Any]]) -> _Pickles:
    """The pickles of the objects of ``make``; a pickled error raises when loaded. Local."""
    try:
        return [_as_tensor(_pickle(obj)) for obj in make()], None
    except Exception as error:
        report = (pg.global_ranks[pg.rank()], report_of(error))
        return [_as_tensor(_FAILED + pickle.dumps(report))] * count, error


def _pickle(obj: Any) -> bytes:
    try:
        return pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)
    except _KINDS as error:
        if type(error) not in _KINDS:
            raise
        told = type(error)(f"objects must be picklable: {text_of(error)}")
        raise told.with_traceback(error.__traceback__) from None


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes_of(data: Tensor) -> memoryview:
    """The memory of a tensor of bytes; a copy if the tensor is on another device."""
    return data.cpu().numpy().data


def _load(data: Tensor | memoryview, weights_only: bool) -> Any:
    raw = data if isinstance(data, memoryview) else _bytes_of(data)
    if raw[: len(_FAILED)] == _FAILED:
        raise_report(*_PlainUnpickler(io.BytesIO(raw[len(_FAILED) :])).load())
    return _PlainUnpickler(io.BytesIO(raw)).load() if weights_only else pickle.loads(raw)


def load_plain(data: bytes) -> Any:
    """Unpickle plain data and tensors; run no other code: an UnpicklingError for anything else."""
    return _PlainUnpickler(io.BytesIO(data)).load()


def _ready(group: AnyGroup, operation: str, weights_only: bool) -> ProcessGroup | None:
    """The group, if this rank is in it; refuses unpickling what strangers may send."""
    pg = member(group, operation)
    if pg is None or weights_only or pg.authenticated:
        return pg
    raise DistBackendError(
        f"{operation} over backend {pg.name()!r} would unpickle what strangers may have sent: "
        f"nothing in this job's set-up proves who is on the other end. Start the program with "
        f"`tilework run`, or set TILEWORK_SECRET to the same random hex string on every rank, or "
        f"pass weights_only=True"
    )


def device_of(pg: ProcessGroup) -> torch.device:
    """The device that the group's tensors must be on: the CPU if the group serves it."""
    record = current_world().records.get(pg)
    devices = record.config.get_device_backend_map() if record else {"cpu": ""}
    return torch.device("cpu" if "cpu" in devices else next(iter(devices)))


def _all_sizes(pg: ProcessGroup, size: int) -> list[int]:
    own_size = torch.tensor([size], dtype=torch.int64, device=device_of(pg))
    sizes = torch.empty(pg.size(), dtype=torch.int64, device=own_size.device)
    collectives.all_gather_into_tensor(sizes, own_size, group=pg)
    return [int(size) for size in sizes.tolist()]


def _room(pg: ProcessGroup, size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device_of(pg))


def _padded(pg: ProcessGroup, data: Tensor, sizes: Sequence[int]) -> tuple[Tensor, list[int]]:
    """``data`` and ``sizes``, padded to the largest unless the backend takes uneven sizes."""
    if pg.uneven_sizes:
        return data.to(device_of(pg)), list(sizes)
    padded = _room(pg, max(sizes)).zero_()
    padded[: data.numel()] = data
    return padded, [max(sizes)] * len(sizes)


def all_gather_object(
    object_list: list[Any], obj: Any, group: AnyGroup = None, *, weights_only: bool = False
) -> None:
    """``object_list[r]`` becomes a copy of rank r's ``obj``, on every rank.

    Args:
        object_list: As long as the group; overwritten.
        obj: This rank's contribution.
        weights_only: Accept plain data and tensors only.

    Example:
        >>> import tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     out = [None, None]
        ...     dist.all_gather_object(out, {"rank": rank})
        ...     return out
        >>> run_ranks(2, program)[0]
        [{'rank': 0}, {'rank': 1}]
    """
    pg = _ready(group, "all_gather_object", weights_only)
    if pg is None:
        return
    size = pg.size()
    (data,), error = _dump(pg, 1, lambda: _checked(object_list, "object_list", size) and [obj])
    received = _all_parts(pg, data, _all_sizes(pg, data.numel()))
    _raise(error)
    object_list[:] = [_load(part, weights_only) for part in received]


def all_gather_pickled(
    data: bytes, sizes: Sequence[int], pg: ProcessGroup, weights_only: bool
) -> list[Any]:
    """All ranks' objects, from this rank's pickle and the ``sizes`` of all. Collective; blocks."""
    received = _all_parts(pg, _as_tensor(data), sizes)
    return [_load(part, weights_only) for part in received]


def _all_parts(pg: ProcessGroup, own: Tensor, sizes: Sequence[int]) -> Sequence[memoryview]:
    """The bytes of all ranks, padded in one tensor if sizes are similar. Collective."""
    most = max(sizes)
    if pg.uneven_sizes and most * len(sizes) > 2 * sum(sizes):
        received = [_room(pg, size) for size in sizes]
        collectives.all_gather(received, own.to(device_of(pg)), group=pg)
        return [_bytes_of(part) for part in received]
    padded, rows = _room(pg, most).zero_(), _room(pg, most * len(sizes))
    padded[: own.numel()] = own
    collectives.all_gather_into_tensor(rows, padded, group=pg)
    whole = _bytes_of(rows)
    return [whole[r * most : r * most + size] for r, size in enumerate(sizes)]


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: AnyGroup = None,
    group_dst: int | None = None,
    *,
    weights_only: bool = False,
) -> None:
    """On rank ``dst``, ``object_gather_list[r]`` becomes a copy of rank r's ``obj``.

    Args:
        object_gather_list: As long as the group on ``dst``, None elsewhere; overwritten.
        dst: The root's global rank (0 if neither ``dst`` nor ``group_dst`` is given).

    Example:
        >>> import tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     out = [None, None] if rank == 0 else None
        ...     dist.gather_object(f"from {rank}", out)
        ...     return out
        >>> run_ranks(2, program)
        [['from 0', 'from 1'], None]
    """
    pg = _ready(group, "gather_object", weights_only)
    if pg is None:
        return
    root = checks.group_root(pg, dst, group_dst, "dst", default=pg.global_ranks[0])
    is_root = pg.rank() == root

    def checked() -> list[Any]:
        if is_root:
            _checked(object_gather_list, "object_gather_list", pg.size())
        elif object_gather_list:
            raise ValueError("object_gather_list must not be given except on dst: pass None")
        return [obj]

    (data,), error = _dump(pg, 1, checked)
    # Minus the size of a report, which all ranks have to get.
    sizes = _all_sizes(pg, data.numel() if error is None else -data.numel())
    if min(sizes) < 0:
        parts = _all_parts(pg, data, [abs(size) for size in sizes])
        _raise(error)
        _load(parts[next(r for r, size in enumerate(sizes) if size < 0)], True)
    data, rooms = _padded(pg, data, sizes)
    received = [_room(pg, size) for size in rooms] if is_root else None
    collectives.gather(data, received, group=pg, group_dst=root)
    if received is not None and object_gather_list is not None:
        for r, size in enumerate(sizes):
            object_gather_list[r] = _load(received[r][:size], weights_only)


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: AnyGroup = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    *,
    weights_only: bool = False,
) -> None:
    """Copy the objects of rank ``src``'s list into every rank's list.

    Args:
        object_list: A list of the same length on every rank; overwritten except on ``src``.
        src: The root's global rank (0 if neither ``src`` nor ``group_src`` is given).
        device: Accepted for torch's sake; the group's device is used.

    Example:
        >>> import tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     objects = [rank, "x" * rank]
        ...     dist.broadcast_object_list(objects, src=1)
        ...     return objects
        >>> run_ranks(2, program)
        [[1, 'x'], [1, 'x']]
    """
    pg = _ready(group, "broadcast_object_list", weights_only)
    if pg is None:
        return
    root = checks.group_root(pg, src, group_src, "src", default=pg.global_ranks[0])
    is_root = pg.rank() == root
    parts, error = _dump(pg, len(object_list), lambda: object_list) if is_root else ([], None)
    sizes = torch.zeros(len(object_list), dtype=torch.int64, device=device_of(pg))
    if is_root:
        sizes.copy_(torch.tensor([part.numel() for part in parts], dtype=torch.int64))
    collectives.broadcast(sizes, group=pg, group_src=root)
    data = torch.cat(parts).to(device_of(pg)) if parts else _room(pg, int(sizes.sum()))
    collectives.broadcast(data, group=pg, group_src=root)
    _raise(error)
    if not is_root:
        object_list[:] = [_load(part, weights_only) for part in torch.split(data, sizes.tolist())]


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int | None = None,
    group: AnyGroup = None,
    group_src: int | None = None,
    *,
    weights_only: bool = False,
) -> None:
    """``scatter_object_output_list[0]`` becomes rank ``src``'s input object r, on each rank r.

    Args:
        scatter_object_output_list: A list that is not empty; the first element is overwritten.
        scatter_object_input_list: On ``src`` one object per rank; ignored elsewhere.
        src: The root's global rank (0 if neither ``src`` nor ``group_src`` is given).

    Example:
        >>> import tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     out = [None]
        ...     dist.scatter_object_list(out, ["a", "b"] if rank == 0 else None, src=0)
        ...     return out[0]
        >>> run_ranks(2, program)
        ['a', 'b']
    """
    pg = _ready(group, "scatter_object_list", weights_only)
    if pg is None:
        return
    if not isinstance(scatter_object_output_list, list) or not scatter_object_output_list:
        raise ValueError(
            "Expected argument scatter_object_output_list to be a list of size at least 1, got "
            f"{scatter_object_output_list!r}"
        )
    root = checks.group_root(pg, src, group_src, "src", default=pg.global_ranks[0])
    parts: list[Tensor] = []
    error = None
    sizes = torch.zeros(pg.size(), dtype=torch.int64, device=device_of(pg))
    if pg.rank() == root:
        given, name = scatter_object_input_list, "scatter_object_input_list"
        parts, error = _dump(pg, pg.size(), lambda: _checked(given, name, pg.size()))
        sizes.copy_(torch.tensor([part.numel() for part in parts], dtype=torch.int64))
    collectives.broadcast(sizes, group=pg, group_src=root)
    rooms = [int(size) for size in sizes.tolist()]
    own_bytes = rooms[pg.rank()]
    if not pg.uneven_sizes:
        parts = [_padded(pg, part, rooms)[0] for part in parts]
        rooms = [max(rooms)] * len(rooms)
    data = _room(pg, rooms[pg.rank()])
    sources = [part.to(data.device) for part in parts] or None
    collectives.scatter(data, sources, group=pg, group_src=root)
    _raise(error)
    scatter_object_output_list[0] = _load(data[:own_bytes], weights_only)


def send_object_list(
    object_list: list[Any],
    dst: int | None = None,
    group: AnyGroup = None,
    device: torch.device | None = None,
    group_dst: int | None = None,
    use_batch: bool = False,
) -> None:
    """Send the objects to rank ``dst``, which receives into a list of the same length.

    Not collective. If an object cannot be pickled, the receiver raises, too.

    Args:
        dst: The receiver's global rank (0 if neither ``dst`` nor ``group_dst`` is given).
        device: Accepted for torch's sake; the group's device is used.
        use_batch: Accepted for torch's sake: there is one way to send.

    Example:
        >>> import tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     objects = ["a", 1] if rank == 0 else [None, None]
        ...     if rank == 0:
        ...         dist.send_object_list(objects, dst=1)
        ...     else:
        ...         dist.recv_object_list(objects, src=0)
        ...     return objects
        >>> run_ranks(2, program)[1]
        ['a', 1]
    """
    pg = _ready(group, "send_object_list", True)
    if pg is None:
        return
    peer = checks.group_root(pg, dst, group_dst, "dst", default=pg.global_ranks[0])
    parts, error = _dump(pg, len(object_list), lambda: object_list)
    sizes = torch.tensor([part.numel() for part in parts], dtype=torch.int64, device=device_of(pg))
    p2p.send(sizes, group=pg, group_dst=peer)
    data = torch.cat(parts).to(device_of(pg)) if parts else _room(pg, 0)
    p2p.send(data, group=pg, group_dst=peer)
    _raise(error)


def recv_object_list(  # noqa: PLR0913
    object_list: list[Any],
    src: int | None = None,
    group: AnyGroup = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    use_batch: bool = False,
    *,
    weights_only: bool = False,
) -> int:
    """Receive objects from rank ``src`` (from any rank if none is given) into the list.

    Not collective. The sender's list must have the same length. ``use_batch`` is accepted for
    torch's sake.

    Returns:
        The sender's global rank; -1 on a rank outside the group.

    Example:
        See :func:`send_object_list`.
    """
    pg = _ready(group, "recv_object_list", weights_only)
    if pg is None:
        return -1
    sizes = torch.zeros(len(object_list), dtype=torch.int64, device=device_of(pg))
    source = p2p.recv(sizes, src, pg, group_src=group_src)
    data = _room(pg, int(sizes.sum()))
    p2p.recv(data, source, pg)
    object_list[:] = [_load(part, weights_only) for part in torch.split(data, sizes.tolist())]
    return source


def _checked(objects: list[Any] | None, name: str, size: int) -> list[Any]:
    """``objects``; raises unless they are a list of ``size`` objects."""
    if isinstance(objects, list) and len(objects) == size:
        return objects
    got = len(objects) if isinstance(objects, list) else type(objects).__name__
    raise ValueError(f"{name} must be a list of {size} objects, one per rank; got {got}")
