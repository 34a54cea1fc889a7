"""What ranks tell each other before they act together, so that all act or all raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from tilework.comm.objects import all_gather_object
from tilework.comm.world import AnyGroup, get_process_group_ranks, member

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
            containers of them), which is all that others accept.

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
    said: tuple[Any, str, str] = (None, "", "")
    try:
        said = (make(), "", "")
    except Exception as error:
        mine = error
        said = (None, _kind(error).__name__, str(error))
    heard: list[Any] = [said]
    if pg.size() > 1:
        heard = [None] * pg.size()
        all_gather_object(heard, said, group=pg, weights_only=True)
    if mine is not None:
        raise mine
    for rank, (_, name, message) in zip(get_process_group_ranks(pg), heard, strict=True):
        if name:
            kind = next(kind for kind in _KINDS if kind.__name__ == name)
            raise kind(f"rank {rank}: {message}")
    return [value for value, _, _ in heard]


def _kind(error: BaseException) -> type[Exception]:
    # The most derived first: NotImplementedError is a RuntimeError.
    found = [kind for kind in _KINDS if isinstance(error, kind)]
    return min(found, key=lambda kind: -len(kind.__mro__), default=RuntimeError)
