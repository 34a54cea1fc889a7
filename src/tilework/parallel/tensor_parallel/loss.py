"""Losses of logits whose classes are sharded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tilework.dtensor import strict


@contextmanager
def loss_parallel() -> Iterator[None]:
    """A context for losses and their ``backward()`` in which operators without a rule raise.

    ``cross_entropy`` and ``nll_loss`` of logits that are sharded in the classes do not gather the
    logits, here or elsewhere: they take a few numbers per element from each rank. Within this
    context an operator that has no rule for a call raises instead of gathering. An operator whose
    rule needs all classes of a row still gathers them. The context is for this rank; open it on
    all ranks.

    Raises:
        NotImplementedError: An operator within has no rule for the call.

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
