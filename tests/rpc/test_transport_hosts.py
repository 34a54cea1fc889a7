"""Workers on several hosts."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tests.hosts import run_on_hosts, two_hosts, why_no_hosts
from tests.rpc.joined_ranks import identity, join, my_name, this_agent
from tilework import rpc
from tilework.errors import PeerLostError

WHY_NOT = why_no_hosts()
needs_hosts = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


@needs_hosts
def test_two_hosts_over_tcp() -> None:
    def program(rank: int) -> Any:
        join(rank)
        names = [rpc.rpc_sync(to, my_name) for to in range(3)]
        far = rpc.rpc_sync((rank + 2) % 3, identity, args=(torch.arange(1 << 20),))
        sums = [int(rpc.remote(to, torch.arange, args=(9,)).to_here().sum()) for to in range(3)]
        rpc.barrier()
        scheme = [p.address.partition(":")[0] for p in this_agent()._transport._peers.values()]
        rpc.shutdown()
        return names, int(far[-1]), sums, scheme

    with two_hosts() as hosts:
        found = run_on_hosts(hosts, (0, 0, 1), program)
    for rank, (names, last, sums, scheme) in enumerate(found):
        assert names == ["w0", "w1", "w2"]
        assert last == (1 << 20) - 1
        assert sums == [36] * 3
        expected = ["ipc", "ipc", "tcp"] if rank < 2 else ["tcp", "tcp", "inproc"]
        assert [s for r, s in enumerate(scheme) if r != rank] == [
            s for r, s in enumerate(expected) if r != rank
        ]


@needs_hosts
def test_a_worker_of_another_host_that_leaves_is_noticed() -> None:
    def program(rank: int) -> Any:
        join(rank)
        rpc.barrier()
        if rank == 1:
            time.sleep(0.2)
            rpc.shutdown(graceful=False)
            return None
        begun = time.monotonic()
        with pytest.raises(PeerLostError, match="worker 'w1'"):
            rpc.rpc_sync("w1", time.sleep, args=(10,))
        rpc.shutdown(graceful=False)
        return time.monotonic() - begun

    with two_hosts() as hosts:
        assert run_on_hosts(hosts, (0, 1), program)[0] < 2
