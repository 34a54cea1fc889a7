"""torch's futures, as RPC makes them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class RpcFuture(torch.futures.Future[T]):
    """A future whose ``wait`` can be interrupted (Ctrl-C), which torch's cannot."""

    def __init__(self) -> None:
        super().__init__()
        self._ready = threading.Event()

    def wait(self) -> T:
        """Block until the future is complete; return the value, or raise the exception."""
        self._ready.wait()
        return super().wait()

    def set_result(self, result: T) -> None:
        """Complete the future with ``result``. Callbacks run on the calling thread."""
        self._ready.set()
        super().set_result(result)

    def set_exception(self, result: Any) -> None:
        """Complete the future with an exception. Callbacks run on the calling thread."""
        self._ready.set()
        super().set_exception(result)


class Later:
    """Returned in place of a result that comes later: RPC answers when ``future`` is complete."""

    def __init__(self, future: torch._C.Future[Any]) -> None:
        self.future = future

    @classmethod
    def of(cls, fn: Callable[..., Any], result: Any) -> Later:
        """The ``result`` of ``fn``, which is marked with async_execution.

        Raises:
            TypeError: The result is no future.
        """
        if not isinstance(result, torch._C.Future):  # of which torch.futures.Future is one kind
            raise TypeError(
                f"{fn.__qualname__} is marked with async_execution, so it must return a "
                f"torch.futures.Future, but it returned {type(result).__name__}"
            )
        return cls(result)
