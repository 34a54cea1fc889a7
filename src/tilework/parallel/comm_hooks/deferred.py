"""Futures of communication hooks whose later phases run when they are waited for.

A hook that communicates twice, the second time with results of the first, must not do so from a
callback's thread: ranks would start their collectives in different orders. The second phase runs
when the reducer waits, bucket after bucket, in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class DeferredFuture(torch.futures.Future[Any]):
    """A future that computes the value when somebody first waits."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        super().__init__()
        self._compute = compute
        self._computed = False

    def wait(self) -> Any:
        """Compute the value at the first call, and return it. Blocks."""
        if not self._computed:
            self._computed = True
            try:
                self.set_result(self._compute())
            except Exception as error:
                self.set_exception(error)
                raise
        return super().wait()

    def value(self) -> Any:
        """The same as :meth:`wait`."""
        return self.wait()

    def then(self, callback: Callable[[torch.futures.Future[Any]], Any]) -> DeferredFuture:
        """A future of ``callback(self)``, computed when somebody waits."""
        return DeferredFuture(lambda: callback(self))
