"""A switch between network namespaces whose packets take a while, and get lost: a program.

    python tests/relay.py DELAY_MS LOSS_PERCENT NAMESPACE/INTERFACE ...

It makes the interfaces, prints ``ready``, and passes on packets until it is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

_CLONE_NEWNET = 0x4000_0000
_TUNSETIFF, _TAP, _NO_PACKET_INFO = 0x4004_54CA, 0x0002, 0x1000


def enter_namespace(name: str) -> None:
    """Move the calling thread, and threads that it starts, to a network namespace, forever."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {name}")


def _interface(name: str) -> int:
    """The descriptor of a new interface in this thread's namespace, which gives packets."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    how = struct.pack("16sH", name.encode(), _TAP | _NO_PACKET_INFO)
    fcntl.ioctl(descriptor, _TUNSETIFF, how)
    return descriptor


def main(delay_ms: str, loss_percent: str, *places: str) -> None:
    """Make the interfaces, and pass on packets."""
    delay, lost = float(delay_ms) / 1000, float(loss_percent) / 100
    ends = []
    for place in places:
        namespace, interface = place.split("/")
        enter_namespace(namespace)
        ends.append(_interface(interface))
    print("ready", flush=True)
    under_way: deque[tuple[float, int, bytes]] = deque()
    chance = random.Random(0)
    while True:
        rest = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for end in select.select(ends, [], [], rest)[0]:
            packet = os.read(end, 1 << 16)
            if chance.random() >= lost:
                under_way.append((time.monotonic() + delay, end, packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, source, packet = under_way.popleft()
            for end in ends:
                if end != source:
                    with contextlib.suppress(OSError):  # full, or not up: the packet is lost
                        os.write(end, packet)


if __name__ == "__main__":
    main(*sys.argv[1:])
