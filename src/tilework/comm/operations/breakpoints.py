"""A debugger on one rank, while the others wait."""

from __future__ import annotations

import pdb
import sys
from collections import Counter
from datetime import timedelta

from tilework.comm.operations.collectives import barrier
from tilework.comm.per_call.callsite import call_site
from tilework.comm.world import current_world, get_rank


class _Calls(Counter[str]):
    """The number of this rank's calls of :func:`breakpoint`, by call site."""


def breakpoint(rank: int = 0, skip: int = 0, timeout_s: float | None = 3600) -> None:
    """Stop one rank in Python's debugger; the other ranks wait in a barrier until it continues.

    Collective over the default group; blocks. The rank needs a terminal as standard input:
    ``tilework run`` gives it to rank 0.

    Args:
        rank: The rank that stops. In the debugger, ``up`` shows the caller's frame.
        skip: Calls at this place to skip before the first stop.
        timeout_s: Seconds that the others wait; None: the group's timeout.

    Raises:
        CollectiveTimeoutError: The rank stayed in the debugger for longer than ``timeout_s``.

    Example:
        >>> import tilework.distributed as dist
        >>> from tilework.testing import run_ranks
        >>> run_ranks(1, lambda rank: dist.breakpoint(skip=1))  # the first call is skipped
        [None]
    """
    site = call_site()
    calls = current_world().state(_Calls)
    calls[site] += 1
    if calls[site] <= skip:
        return
    if get_rank() == rank:
        print(f"rank {rank} stops at {site}: `up` goes there, `c` continues", file=sys.stderr)
        pdb.set_trace()  # the purpose of this function
    barrier(timeout=None if timeout_s is None else timedelta(seconds=timeout_s))
