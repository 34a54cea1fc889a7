"""tilework's Work as torch's, for Python callers and for torch's C++ code."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from tilework.comm.contract import CompletedWork, ProcessGroup, Work

_c10d: Any = torch._C._distributed_c10d
_Future = torch.futures.Future[list[Tensor]]
#: Held while the rest of an operation runs, which waits for nobody.
_finishing = threading.Lock()


class TorchWork(_c10d.Work):  # type: ignore[misc]
    """An operation, which may still run; ``finish`` is for the first who waits."""

    def __init__(
        self, work: Work, group: ProcessGroup, finish: Callable[[], None] | None = None
    ) -> None:
        super().__init__()
        self._work = work
        self._group = group
        self._finish = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        done = self._work.wait(timeout or None)  # C++ writes "none" as zero
        if self._finish is not None:
            self._end()
        return done

    def _end(self) -> None:
        with _finishing:
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


class DoneWork(TorchWork):
    """An operation that was done before its call returned: the usual case, and quick."""

    _finish = None

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        _c10d.Work.__init__(self)
        self._outputs = outputs

    @property
    def _work(self) -> Work:  # type: ignore[override]
        return CompletedWork(self._outputs)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True
