"""The gradient bucket that a communication hook gets, the type of hooks, and late futures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class GradBucket:
    """The gradients of one bucket, as a communication hook sees them.

    All gradients lie one after the other in :meth:`buffer`: this rank's gradients, before the
    average. The hook returns a future of the tensor that replaces the buffer.
    """

    def __init__(
        self,
        index: int,
        buffer: Tensor,
        gradients: Sequence[Tensor],
        parameters: Sequence[Tensor],
        is_last: bool,
    ) -> None:
        self._index, self._buffer, self._is_last = index, buffer, is_last
        self._gradients, self._parameters = list(gradients), list(parameters)

    def index(self) -> int:
        """The bucket's place in the order of reduction, from 0."""
        return self._index

    def buffer(self) -> Tensor:
        """All gradients of the bucket in one flat tensor; shares memory with the bucket."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """Views of the buffer, in the shapes of the parameters."""
        return list(self._gradients)

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of :meth:`gradients`."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """True for the last bucket of a backward pass."""
        return self._is_last

    def set_buffer(self, tensor: Tensor) -> None:
        """Replace the buffer by another of the same number of elements.

        Raises:
            ValueError: The sizes differ.
        """
        if tensor.numel() != self._buffer.numel():
            raise ValueError(
                f"a bucket of {self._buffer.numel()} elements cannot have a buffer of "
                f"{tensor.numel()}"
            )
        self._buffer = tensor

    def __repr__(self) -> str:
        return (
            f"GradBucket(index={self._index}, {len(self._parameters)} gradients, "
            f"{self._buffer.nbytes} bytes, is_last={self._is_last})"
        )


#: ``hook(state, bucket)`` starts the reduction of a bucket and returns a future of the result.
CommHook = Callable[[Any, GradBucket], "torch.futures.Future[Any]"]


class DeferredFuture(torch.futures.Future[Any]):
    """A future that computes the value when somebody first waits.

    A hook that communicates twice must not do so from a callback's thread: ranks would start their
    collectives in different orders. The reducer waits for buckets in the same order on every rank.
    """

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
