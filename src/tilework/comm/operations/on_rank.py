"""Work that one rank does for all, and checks that all ranks have equal values."""

from __future__ import annotations

import pdb
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from hashlib import blake2b
from typing import Any, TypeVar

import torch
from torch import Tensor

from tilework.comm.agreement import agree_equal
from tilework.comm.operations.collectives import barrier
from tilework.comm.operations.objects import broadcast_object_list
from tilework.comm.per_call import checks
from tilework.comm.per_call.callsite import call_site
from tilework.comm.world import AnyGroup, current_world, get_rank, member
from tilework.errors import text_of

T = TypeVar("T")


def on_rank(rank: int, fn: Callable[[], T], group: AnyGroup = None) -> T:
    """Call ``fn`` on one rank; all ranks return the result, or raise the error.

    Collective; blocks. The other ranks wait, as in any collective, no longer than the group's
    timeout. ``fn`` must not communicate.

    Args:
        rank: The global rank.
        fn: A function with a picklable result or error; other ranks get copies. Other ranks do not
            call it, and may pass None.
        group: The group of the ranks that call; None: the default group.

    Raises:
        Exception: The error of ``fn``. Other ranks raise the same class, with the rank in a note,
            or a RuntimeError with the error's text if the error cannot be pickled.
        TypeError: The result of ``fn`` cannot be pickled; on all ranks.
        ValueError: The rank is not in the group.

    Example:
        >>> from tilework.testing import run_ranks
        >>> from tilework.distributed import on_rank
        >>> run_ranks(3, lambda rank: on_rank(0, lambda: {"read by": rank}))
        [{'read by': 0}, {'read by': 0}, {'read by': 0}]
    """
    pg = member(group, "on_rank")
    if pg is None:
        return None  # type: ignore[return-value]
    root = checks.group_root(pg, rank, None, "rank")
    value: Any = None
    error: Exception | None = None
    parcel = [b"", b""]
    if pg.rank() == root:
        try:
            value = fn()
            parcel[0] = _pickled(value, "on_rank hands what fn returns to the other ranks, and")
        except Exception as raised:
            error = raised
            parcel[1] = _pickled_error(raised)
    broadcast_object_list(parcel, group=pg, group_src=root)
    if error is not None:
        raise error
    if pg.rank() == root:
        return value  # type: ignore[no-any-return]
    if parcel[1]:
        raise _told(parcel[1], rank)
    return pickle.loads(parcel[0])  # type: ignore[no-any-return]


def _pickled(value: Any, purpose: str) -> bytes:
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise TypeError(
            f"{purpose} a {type(value).__name__} cannot be pickled: {text_of(error)}"
        ) from error


def _pickled_error(error: Exception) -> bytes:
    text = f"{type(error).__name__}: {text_of(error)}"
    try:
        data = pickle.dumps((error, text), pickle.HIGHEST_PROTOCOL)
        pickle.loads(data)  # some classes with own arguments pickle, and then do not unpickle
        return data
    except Exception:
        return pickle.dumps((None, text), pickle.HIGHEST_PROTOCOL)


def _told(data: bytes, rank: int) -> Exception:
    """This rank's error for the error of ``fn`` on ``rank``, pickled in ``data``."""
    error, text = pickle.loads(data)
    if not isinstance(error, Exception):
        return RuntimeError(f"rank {rank}: {text}")
    if hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(f"raised on rank {rank} by the function of on_rank")
    return error


def assert_same(value: Any, what: str = "the value", group: AnyGroup = None) -> None:
    """Raise on every rank unless all ranks have equal values; the error names the difference.

    Collective; blocks; sends a digest of each part. Tensors are equal if dtype, shape and bits are.
    Dicts, lists and tuples are compared part by part, sets in any order, other objects by their
    pickles.

    Args:
        value: Plain data and tensors, which may be nested.
        what: The name of the value, for messages.
        group: The group of the ranks that call; None: the default group.

    Raises:
        ValueError: Ranks have different values; the error names the part and the ranks.
        TypeError: A tensor is part of a distributed tensor, such as a DTensor; or a value cannot be
            pickled.

    Example:
        >>> import torch
        >>> from tilework.testing import run_ranks
        >>> from tilework.distributed import assert_same
        >>> def program(rank):
        ...     try:
        ...         assert_same({"seed": 0, "weights": torch.full((2,), float(rank))}, "the state")
        ...     except ValueError as error:
        ...         return str(error)[:58]
        >>> run_ranks(2, program)[1]
        "the state must be the same on all ranks: ['weights']=float"
    """
    agree_equal(
        lambda: dict(_parts(value, "value")), group, f"{what} must be the same on all ranks:"
    )


def _parts(value: Any, path: str) -> Iterator[tuple[str, str]]:
    name = path.removeprefix("value") or path
    if isinstance(value, Mapping):
        yield f"{name}.keys()", str([repr(key) for key in value])
        for key, each in value.items():
            yield from _parts(each, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        yield f"len({name})", str(len(value))
        for number, each in enumerate(value):
            yield from _parts(each, f"{path}[{number}]")
    elif isinstance(value, set | frozenset):  # equal sets may have another order
        texts = sorted(str(list(_parts(each, path))) for each in value)
        yield name, f"{type(value).__name__} of digest {_digest(str(texts).encode())}"
    elif isinstance(value, Tensor):
        yield name, _tensor_text(value, name)
    elif isinstance(value, int | float | str | bool | None):
        yield name, repr(value)
    else:
        data = _pickled(value, f"assert_same compares {name} by a digest, and")
        yield name, f"{type(value).__name__} of digest {_digest(data)}"


def _tensor_text(tensor: Tensor, name: str) -> str:
    checks.refuse_parts(tensor, name)
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    dtype = str(tensor.dtype).removeprefix("torch.")
    digest = _digest(plain.reshape(-1).view(torch.uint8).numpy())
    return f"{dtype}{list(tensor.shape)} of digest {digest}"


def _digest(data: Any) -> str:
    return blake2b(data, digest_size=6).hexdigest()


class _Calls(Counter[str]):
    """The number of this rank's calls of :func:`breakpoint`, by call site."""


def breakpoint(rank: int = 0, skip: int = 0, timeout_s: float | None = 3600) -> None:
    """Stop one rank in Python's debugger; the other ranks wait in a barrier until it continues.

    Collective over the default group; blocks. The rank needs a terminal as standard input:
    ``tilework run`` gives it to rank 0.

    Args:
        rank: The rank that stops. In the debugger, ``up`` shows the caller's frame.
        skip: Calls at this place to skip before the first stop.
        timeout_s: Seconds that the others wait; None: the group's timeout.

    Raises:
        CollectiveTimeoutError: The rank stayed in the debugger for longer than ``timeout_s``.

    Example:
        >>> import tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> run_ranks(1, lambda rank: dist.breakpoint(skip=1))  # the first call is skipped
        [None]
    """
    site = call_site()
    calls = current_world().state(_Calls)
    calls[site] += 1
    if calls[site] <= skip:
        return
    if get_rank() == rank:
        print(f"rank {rank} stops at {site}: `up` goes there, `c` continues", file=sys.stderr)
        pdb.set_trace()  # the purpose of this function
    barrier(timeout=None if timeout_s is None else timedelta(seconds=timeout_s))
