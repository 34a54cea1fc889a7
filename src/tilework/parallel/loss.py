"""Losses of logits whose classes are cut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tilework.dtensor import strict


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Compute losses within, and call ``backward()``, without gathering any logits.

    ``cross_entropy`` of logits that are cut in their classes does not gather them anyway: from
    each rank it takes the greatest logit and the sums that it needs, a few numbers per element.
    Within this context that is made sure of: an operator that would gather raises instead. For
    this rank; open it on all of them.

    Raises:
        NotImplementedError: Within it, by an operator that would gather.

    Example:
        >>> import torch
        >>> from torch.nn.functional import cross_entropy
        >>> from tilework.dtensor import Shard, distribute_tensor, init_device_mesh
        >>> from tilework.parallel import loss_parallel
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     logits = distribute_tensor(torch.zeros(3, 8), mesh, [Shard(1)])
        ...     with loss_parallel():
        ...         return cross_entropy(logits, torch.tensor([1, 7, 0])).item()
        >>> run_ranks(2, program)[0]  # log(8)
        2.079...
    """
    with strict():
        yield
