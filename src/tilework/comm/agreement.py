"""What ranks tell each other before they act together, so that all act or all raise."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, TypeVar

import torch

from tilework.comm.collectives import all_gather_into_tensor
from tilework.comm.contract import ProcessGroup
from tilework.comm.objects import all_gather_pickled, device_of
from tilework.comm.world import AnyGroup, member

T = TypeVar("T")

_KINDS = (
    AttributeError,
    IndexError,
    KeyError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)


def agree(make: Callable[[], T], group: AnyGroup = None) -> list[T]:
    """What ``make()`` returns on each rank of the group; or what it raises, on every rank.

    Collective; blocks. So a check that fails on one rank leaves no other waiting: the rank
    raises its own error, the others one of the same builtin class that names the rank.

    Args:
        make: Makes this rank's contribution, without communicating: plain data (numbers, strings,
            containers of them), which is all that others accept. Where all ranks say the same it
            is returned for each of them as it is, not copied.

    Raises:
        Exception: ``make`` raised, here or on another rank.

    Example:
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     return agree(lambda: rank * 10)
        >>> run_ranks(3, program)[0]
        [0, 10, 20]
    """
    pg = member(group, "agree")
    if pg is None:
        return []
    mine: BaseException | None = None
    try:
        said: tuple[Any, str, str] = (make(), "", "")
        data = pickle.dumps(said, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        mine = error
        said = (None, _kind(error).__name__, str(error))
        data = pickle.dumps(said, pickle.HIGHEST_PROTOCOL)
    heard: list[Any] = [said] * pg.size() if pg.size() == 1 else _heard(said, data, pg)
    if mine is not None:
        raise mine
    for rank, (_, name, message) in zip(pg.global_ranks, heard, strict=True):
        if name:
            kind = next(kind for kind in _KINDS if kind.__name__ == name)
            raise kind(f"rank {rank}: {message}")
    return [value for value, _, _ in heard]


def _heard(said: Any, data: bytes, pg: ProcessGroup) -> list[Any]:
    """What each rank said, which is ``data`` on the way. Collective."""
    digest = int.from_bytes(blake2b(data, digest_size=8).digest(), "big") >> 1
    row = torch.tensor([digest, len(data)], device=device_of(pg))
    rows = row.new_empty(pg.size(), 2)
    all_gather_into_tensor(rows, row, pg)
    digests, sizes = zip(*rows.tolist(), strict=True)
    if digests.count(digest) == len(digests):
        return [said] * len(digests)  # as mostly
    return all_gather_pickled(data, sizes, pg, weights_only=True)


def _kind(error: BaseException) -> type[Exception]:
    # The most derived first: NotImplementedError is a RuntimeError.
    found = [kind for kind in _KINDS if isinstance(error, kind)]
    return min(found, key=lambda kind: -len(kind.__mro__), default=RuntimeError)
