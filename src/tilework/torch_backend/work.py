"""tilework's Work as torch's, for Python callers and for torch's C++ code."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup, Work

_c10d: Any = torch._C._distributed_c10d
_Future = torch.futures.Future[list[Tensor]]


class DoneWork(_c10d.Work):  # type: ignore[misc]
    """An operation that was done before its call returned."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._outputs = outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def synchronize(self) -> None:
        """Do nothing: the operation is done."""

    def block_current_stream(self) -> None:
        """Do nothing: there are no streams on a CPU."""

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[Tensor]:
        return list(self._outputs)

    def get_future(self) -> _Future:
        future: _Future = torch.futures.Future()
        future.set_result(self.result())
        return future


class RunningWork(_c10d.Work):  # type: ignore[misc]
    """An operation that may still run. If it fails, :meth:`wait` raises tilework's own error.

    Args:
        work: The operation.
        group: The group that runs it.
        finish: The rest of the operation on this rank, for the first who waits.
    """

    def __init__(
        self, work: Work, group: ProcessGroup, finish: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self._work = work
        self._group = group
        self._finish = finish
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        done = self._work.wait(timeout or None)  # C++ writes "none" as zero
        self._end()
        return done

    def _end(self) -> None:
        if self._finish is not None:
            with self._lock:
                finish, self._finish = self._finish, None
                if finish is not None:
                    finish()

    def synchronize(self) -> None:
        """Wait until the operation is done: a CPU has no stream to order after it."""
        self.wait()

    def block_current_stream(self) -> None:
        """Wait, as :meth:`synchronize` does."""
        self.wait()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> BaseException | None:
        return self._work.exception()

    def result(self) -> list[Tensor]:
        return self._work.result()

    def source_rank(self) -> int:
        """For a receive: the group rank that the message came from."""
        return self._group.global_ranks.index(self._work.source_rank())

    _source_rank = source_rank

    def get_future(self) -> _Future:
        """A future of the output tensors; if the operation fails, torch's C++ code sees that, too.

        A future that Python code fails looks complete to C++, and DDP's reducer would read the
        exception as gradients. A future fails everywhere if a callback raises, as a RuntimeError
        with the error's name and text. Therefore the future here is that of a callback that raises
        the error.
        """
        return self._work.get_future().then(self._value)

    def _value(self, done: _Future) -> list[Tensor]:
        value = done.value()
        self._end()
        return value


AnyWork = DoneWork | RunningWork
