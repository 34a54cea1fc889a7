"""Real hosts on one machine: network namespaces joined by links that may be slow.

Each host has separate interfaces, addresses and (abstract) Unix sockets: ranks on different hosts
share no memory and reach each other only over the link. Needs Linux, root, ``ip`` and ``tc``.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

import tilework.distributed as dist
from tests.relay import enter_namespace
from tilework.testing import run_ranks

_Result = TypeVar("_Result")
_PORT = 29400


@dataclass(frozen=True)
class Host:
    """A network namespace that plays a host, with one network interface besides the loopback."""

    name: str
    interface: str
    address: str

    def enter(self) -> None:
        """Move the calling thread, and threads that it starts, to the host, forever."""
        enter_namespace(self.name)

    def run(self, *command: str) -> str:
        """Run a command on the host; return its output."""
        return _run("ip", "netns", "exec", self.name, *command)

    def sent_bytes(self) -> int:
        """The number of bytes that this host has sent over the link, with all headers."""
        return int(self.run("cat", f"/sys/class/net/{self.interface}/statistics/tx_bytes"))


def why_no_hosts(delay_ms: float = 0.0) -> str | None:
    """The reason why hosts, with such a delay between them, cannot be made here; None if they
    can.
    """
    if os.name != "posix" or os.geteuid() != 0:
        return "making network namespaces needs root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found (Debian: apt install iproute2)"
    try:
        with two_hosts(100, delay_ms):
            return None
    except subprocess.CalledProcessError as error:
        return f"this system does not let such hosts be made: {error.stderr.strip()}"


@contextlib.contextmanager
def two_hosts(
    mbit: int | None = None, delay_ms: float = 0.0, loss_percent: float = 0.0
) -> Iterator[tuple[Host, Host]]:
    """:func:`joined_hosts` with two hosts."""
    with joined_hosts(2, mbit, delay_ms, loss_percent) as (near, far):
        yield near, far


@contextlib.contextmanager
def joined_hosts(
    count: int, mbit: int | None = None, delay_ms: float = 0.0, loss_percent: float = 0.0
) -> Iterator[tuple[Host, ...]]:
    """Hosts on a switch, each with a link of ``mbit`` megabits a second each way; None: unlimited.

    Packets take ``delay_ms`` from host to host, and ``loss_percent`` of them are lost.
    """
    mark = secrets.token_hex(3)
    hosts = [Host(f"tw-{mark}-{i}", f"tw{mark}{i}", f"10.213.77.{i + 1}") for i in range(count)]
    is_far = bool(delay_ms or loss_percent)
    join = partial(_relayed, hosts, delay_ms, loss_percent) if is_far else partial(_bridged, hosts)
    with contextlib.ExitStack() as stack:
        for host in hosts:
            stack.enter_context(_namespace(host.name))
        stack.enter_context(join())
        for host in hosts:
            host.run("ip", "address", "add", f"{host.address}/24", "dev", host.interface)
            host.run("ip", "link", "set", "lo", "up")
            host.run("ip", "link", "set", host.interface, "up")
            if mbit is not None:
                limits = ("tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms")
                host.run("tc", "qdisc", "add", "dev", host.interface, "root", *limits)
        yield tuple(hosts)


@contextlib.contextmanager
def _namespace(name: str) -> Iterator[None]:
    _run("ip", "netns", "add", name)
    try:
        yield
    finally:
        if Path(f"/run/netns/{name}").exists():
            _run("ip", "netns", "delete", name)


@contextlib.contextmanager
def _bridged(hosts: Sequence[Host]) -> Iterator[None]:
    """Join hosts by a bridge of the kernel."""
    switch = Host(f"{hosts[0].name}-switch", "bridge", "")
    with _namespace(switch.name):
        switch.run("ip", "link", "add", switch.interface, "type", "bridge")
        switch.run("ip", "link", "set", switch.interface, "up")
        for host in hosts:
            peer = ("peer", "name", host.interface, "netns", switch.name)
            host.run("ip", "link", "add", host.interface, "type", "veth", *peer)
            switch.run("ip", "link", "set", host.interface, "master", switch.interface, "up")
        yield


@contextlib.contextmanager
def _relayed(hosts: Sequence[Host], delay_ms: float, loss_percent: float) -> Iterator[None]:
    """Join hosts by a process that passes on packets later: not every kernel has netem."""
    words = [str(delay_ms), str(loss_percent), *(f"{x.name}/{x.interface}" for x in hosts)]
    command = [sys.executable, str(Path(__file__).with_name("relay.py")), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as relay:
        assert relay.stdout is not None
        assert relay.stderr is not None
        try:
            if relay.stdout.readline() != b"ready\n":
                raise subprocess.CalledProcessError(
                    relay.wait(), command, stderr=relay.stderr.read().decode()
                )
            yield
        finally:
            relay.kill()


def run_on_hosts(
    hosts: Sequence[Host],
    host_of: Sequence[int],
    fn: Callable[[int], _Result],
    backend: str | None = "hybrid",
    timeout: timedelta = timedelta(seconds=120),
) -> list[_Result]:
    """Run ``fn(rank)`` in processes, rank r on ``hosts[host_of[r]]``; return the results.

    Each rank has a default group of all ranks. They meet at a store on rank 0's host.
    """

    def body(rank: int) -> _Result:
        with joined(hosts, host_of, rank, backend, timeout):
            return fn(rank)

    return run_ranks(len(host_of), body, kind="processes", init=False, timeout=timeout)


@contextlib.contextmanager
def joined(
    hosts: Sequence[Host],
    host_of: Sequence[int],
    rank: int,
    backend: str | None = "hybrid",
    timeout: timedelta = timedelta(seconds=120),
) -> Iterator[dist.Store]:
    """Make this process rank ``rank`` of a default group of all ranks, on ``hosts[host_of[rank]]``.

    Gives the store that the ranks met at. The process must have no other thread, and stays on the
    host after the block.
    """
    hosts[host_of[rank]].enter()
    address, size = hosts[host_of[0]].address, len(host_of)
    with dist.TCPStore(address, _PORT, size, rank == 0, timeout, secret=b"two hosts") as store:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        yield store
        dist.destroy_process_group()
        if store.add("ended", 1) == size:
            store.set("all ended", "")
        if rank == 0:  # rank 0 serves the store, which the others need to the end
            store.wait(["all ended"])


def _run(*command: str) -> str:
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    return done.stdout
