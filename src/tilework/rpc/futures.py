"""Futures, as RPC makes them, and gatherings: objects of several ranks in a future."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from tilework.errors import PeerLostError

T = TypeVar("T")


class RpcFuture(torch.futures.Future[T]):
    """A future whose ``wait`` can be interrupted (Ctrl-C), which torch's cannot."""

    def __init__(self) -> None:
        super().__init__()
        self._ready = threading.Event()

    def wait(self) -> T:
        self._ready.wait()
        return super().wait()

    def set_result(self, result: T) -> None:
        self._ready.set()
        super().set_result(result)

    def set_exception(self, result: Any) -> None:
        self._ready.set()
        super().set_exception(result)


class Later:
    """Returned in place of a result that comes later: RPC answers when ``future`` is complete."""

    def __init__(self, future: torch._C.Future[Any]) -> None:
        self.future = future

    @classmethod
    def of(cls, fn: Callable[..., Any], result: Any) -> Later:
        """The ``result`` of ``fn``, which is marked with async_execution."""
        if not isinstance(result, torch._C.Future):  # of which torch.futures.Future is one kind
            raise TypeError(
                f"{fn.__qualname__} is marked with async_execution, so it must return a "
                f"torch.futures.Future, but it returned {type(result).__name__}"
            )
        return cls(result)


#: A gathering: the purpose, the ranks, and a number among gatherings of the same kind.
Key = tuple[str, tuple[int, ...], int]


class _Round:
    """A gathering on the rank that collects: the objects so far, and the future of all objects."""

    def __init__(self) -> None:
        self.objects: dict[int, Any] = {}
        self.future: RpcFuture[dict[int, Any]] = RpcFuture()


class Gatherings:
    """A rank's part in gatherings: counts those that it joins, and collects objects."""

    def __init__(self) -> None:
        self._lock, self._joining = threading.Lock(), threading.Lock()
        self._counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._rounds: dict[Key, _Round] = {}
        self._lost: set[int] = set()

    @contextmanager
    def joining(self, purpose: str, ranks: tuple[int, ...]) -> Iterator[Key]:
        """The key of the next gathering of ``ranks`` for ``purpose``; equal on all these ranks.

        If the block raises, as with an object that does not pickle, the gathering does not count.
        """
        with self._joining:
            number = self._counts[purpose, ranks] + 1
            yield purpose, ranks, number
            self._counts[purpose, ranks] = number

    def arrive(self, key: Key, rank: int, obj: Any) -> Later:
        """Add ``obj`` of ``rank`` to a gathering; later, all ranks' objects. On the rank that
        collects.
        """
        _, ranks, _ = key
        with self._lock:
            gone = sorted(self._lost.intersection(ranks))
            if gone:
                raise _lost_error(key, gone)
            round = self._rounds.setdefault(key, _Round())
            round.objects[rank] = obj
            complete = len(round.objects) == len(ranks)
            if complete:
                del self._rounds[key]
        if complete:
            round.future.set_result({rank: round.objects[rank] for rank in ranks})
        return Later(round.future)

    def lose(self, rank: int) -> None:
        with self._lock:
            self._lost.add(rank)
            ended = [key for key in self._rounds if rank in key[1]]
            rounds = {key: self._rounds.pop(key) for key in ended}
        for key, round in rounds.items():
            round.future.set_exception(_lost_error(key, [rank]))


def _lost_error(key: Key, gone: list[int]) -> PeerLostError:
    purpose, ranks, _ = key
    return PeerLostError(
        f"{purpose} among ranks {list(ranks)}: ranks {gone} died or left", ranks=gone
    )
