"""``tilework doctor --rdzv``: what a job over several hosts needs, tried before the job."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch

import tilework.distributed as dist
from tilework.comm.backends.machine import reachable_address
from tilework.errors import DistError, DistNetworkError, DistStoreError
from tilework.framed import Door, knock
from tilework.launch.doctor import ReportLine, failed, seconds_for, show_report
from tilework.launch.nodes import door_at, open_door, secret_bytes, version
from tilework.store import PrefixStore, Store, StoreServer, TCPStore

if sys.platform == "linux":
    import fcntl

Facts = dict[str, Any]
#: Seconds for all hosts to come, and for a connection.
_PATIENCE_SECONDS: Final = 60.0
_CONNECT_SECONDS: Final = 5.0
#: Round trips, and the seconds for which bytes are sent, on each link.
_TRIPS: Final = 50
_SEND_SECONDS: Final = 0.2
_BLOCK: Final = bytes(1 << 18)
#: What must be equal on all hosts, with the advice if it is not.
_EQUAL: Final = {
    "tilework": "install the same version everywhere",
    "headers": "the files of tilework.comm differ: install the same build everywhere",
    "torch": "install the same version everywhere",
    "Python": "use the same version everywhere: objects are pickled between ranks",
}
_CLOCK_SECONDS: Final = 1.0
#: A link counts as slow if it is so many times worse than the median link.
_OUTLIER: Final = 4.0


@dataclass(frozen=True)
class LinkFigures:
    """A link between two hosts, as the host that connected (the source) has measured it.

    ``error``, if not empty, says why there was no connection; ``trip`` is the shortest time of a
    round trip; ``clock`` how far the other's clock is ahead (seconds); ``rate`` in bytes per
    second.
    """

    source: int
    target: int
    error: str = ""
    trip: float = 0.0
    clock: float = 0.0
    rate: float = 0.0


def doctor_of_hosts(host: str, port: int, hosts: int) -> int:
    """Try what a job over ``hosts`` hosts needs, with the doctors of the others; blocks.

    The host that has the address ``host`` serves the store at which the doctors meet. Returns 0 if
    all is well, else 1: the same on all hosts that met. Raises NodesError if TILEWORK_SECRET is not
    hexadecimal.
    """
    secret = secret_bytes(os.environ.get("TILEWORK_SECRET", ""))
    with contextlib.ExitStack() as stack:
        try:
            store, me, facts = _introduce(_meet(stack, host, port, secret), hosts)
            sections = _examine(store, me, facts)
            show_report(sections)
            bad = any(line.state == "bad" for lines in sections.values() for line in lines)
            return int(_leave(store, hosts, me, bad))
        except (DistError, OSError) as error:
            advice = "check the name, the port, the firewall, and the doctor on the other hosts"
            where, what = f"{host}:{port}", str(error).partition("\n")[0]
            show_report({"Meeting": [ReportLine(where, what, "bad", advice)]})
            return 1


def _examine(store: Store, me: int, facts: Sequence[Facts]) -> dict[str, list[ReportLine]]:
    links = _measure_all(store, me, facts)
    return {
        "Hosts": [_line_of_host(n, each, me) for n, each in enumerate(facts)],
        "Equal everywhere": compare_versions(facts),
        "Links": judge_links(facts, links),
        "A group": [_try_group(store, me, facts)],
    }


def _meet(stack: contextlib.ExitStack, host: str, port: int, secret: bytes | None) -> Store:
    """The doctors' store, which is served here if this host has that address and the port."""
    with contextlib.suppress(DistNetworkError):
        server = stack.enter_context(StoreServer.listen_tcp(host, port, secret))
        server.start()
    limit = timedelta(seconds=_PATIENCE_SECONDS)
    client = TCPStore(host, port, timeout=limit, secret=secret)
    return PrefixStore("tilework/doctor", stack.enter_context(contextlib.closing(client)))


def _introduce(whole: Store, hosts: int) -> tuple[Store, int, list[Facts]]:
    """The store of these doctors, this host's number, and what all hosts say of themselves."""
    mine = facts_of_this_host(whole)
    run, number = divmod(whole.add("came", 1) - 1, hosts)
    store = PrefixStore(str(run), whole)
    store.set(f"facts/{number}", json.dumps({**mine, "hosts": hosts}))
    deadline = time.monotonic() + _PATIENCE_SECONDS
    keys = [f"facts/{each}" for each in range(hosts)]
    while not store.check(keys):
        if time.monotonic() > deadline:
            came = [json.loads(store.get(key))["name"] for key in keys if store.check([key])]
            whole.add("came", -1)
            raise DistStoreError(
                f"{len(came)} of {hosts} hosts came within {_PATIENCE_SECONDS:g} s: "
                f"{', '.join(came)}"
            )
        time.sleep(0.05)
    facts = [json.loads(store.get(key)) for key in keys]
    if len({each["hosts"] for each in facts}) > 1:
        said = ", ".join(f"{each['name']} {each['hosts']}" for each in facts)
        raise DistStoreError(f"the doctors differ in --nnodes: {said}")
    return store, number, facts


def facts_of_this_host(store: Store) -> Facts:
    """The names, addresses and versions of this host, and the wall clock."""
    name = socket.gethostname()
    address = reachable_address(store)
    try:
        means = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})
    except OSError:
        means = []
    return {
        "name": name,
        "address": address,
        "means": means,
        "interface": _interface_of(address),
        "variable": os.environ.get("GLOO_SOCKET_IFNAME", ""),
        "tilework": version(),
        "headers": _headers(),
        "torch": str(torch.__version__),
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }


def _headers() -> str:
    """A digest of the files that say what ranks send each other."""
    digest = hashlib.sha256()
    for path in sorted((Path(__file__).parents[1] / "comm").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _interface_of(address: str) -> str:
    """The network interface that has ``address``; empty where that is unknown."""
    if sys.platform == "linux":
        for _, name in socket.if_nameindex():
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                request = name.encode()[:15].ljust(256, b"\0")
                with contextlib.suppress(OSError):
                    reply = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
                    if socket.inet_ntoa(reply[20:24]) == address:
                        return name
    return ""


# -- links ----------------------------------------------------------------------------------


def _measure_all(store: Store, me: int, facts: Sequence[Facts]) -> list[LinkFigures]:
    """Measure the links between all hosts, each host with a single other at a time."""
    size = len(facts)
    others = set(range(size)) - {me}
    ended = threading.Event()
    with contextlib.ExitStack() as stack:
        address = facts[me]["address"]
        door, _ = stack.enter_context(open_door(store, f"listens/{me}", address, others))
        stack.enter_context(ThreadPoolExecutor(1)).submit(_answer_others, door, ended)
        stack.callback(ended.set)  # also if a host is lost
        for turn, pairs in enumerate(rounds_of(size)):
            for source, target in (*pairs, *((b, a) for a, b in pairs)):
                if source == me:
                    link = _measure(store, facts, me, target)
                    store.set(f"link/{me}/{target}", json.dumps(vars(link)))
            store.set(f"turn/{turn}/{me}", "")
            store.wait([f"turn/{turn}/{each}" for each in range(size)])
    keys = [f"link/{a}/{b}" for a in range(size) for b in range(size) if a != b]
    return [LinkFigures(**json.loads(store.get(key))) for key in keys]


def rounds_of(size: int) -> Iterator[list[tuple[int, int]]]:
    """All pairs of ``size`` hosts, in rounds in which each host has a single partner.

    Example:
        >>> list(rounds_of(4))
        [[(0, 3), (1, 2)], [(0, 2), (3, 1)], [(0, 1), (2, 3)]]
    """
    circle = list(range(size + size % 2))
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        yield [(a, b) for a, b in pairs if a < size and b < size]
        circle.insert(1, circle.pop())


def _measure(store: Store, facts: Sequence[Facts], me: int, target: int) -> LinkFigures:
    port, token = door_at(store, f"listens/{target}")
    try:
        line = socket.create_connection((facts[target]["address"], port), _CONNECT_SECONDS)
    except OSError as error:
        return LinkFigures(me, target, str(error.strerror or error))
    with line:
        try:
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            knock(line, token, me)
            trips = [_round_trip(line) for _ in range(_TRIPS)]
            begun, sent = time.monotonic(), 0
            while time.monotonic() - begun < _SEND_SECONDS:
                line.sendall(_BLOCK)
                sent += len(_BLOCK)
            line.shutdown(socket.SHUT_WR)
            line.recv(1)  # the other has got all
            rate = sent / (time.monotonic() - begun)
        except OSError as error:
            return LinkFigures(me, target, f"the connection ended: {error.strerror or error}")
    trip, clock = min(trips)
    return LinkFigures(me, target, "", trip, clock, rate)


def _round_trip(line: socket.socket) -> tuple[float, float]:
    """Seconds of a round trip, and the seconds by which the other's clock is ahead."""
    sent, begun = time.time(), time.monotonic()
    line.sendall(b"?")
    theirs = float(line.recv(32, socket.MSG_WAITALL))
    took = time.monotonic() - begun
    return took, theirs - (sent + took / 2)


def _answer_others(door: Door, ended: threading.Event) -> None:
    while not ended.is_set():
        for line in door.admit(0.1).values():
            with line, contextlib.suppress(OSError):
                line.settimeout(_CONNECT_SECONDS)
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for _ in range(_TRIPS):
                    line.recv(1)
                    line.sendall(f"{time.time():<32.9f}".encode())
                while line.recv(len(_BLOCK)):
                    pass
                line.sendall(b".")


# -- verdicts -------------------------------------------------------------------------------


def _line_of_host(number: int, facts: Facts, me: int) -> ReportLine:
    name = f"{number} {facts['name']}" + (" (here)" if number == me else "")
    address = f"{facts['address']} on {facts['interface'] or 'an unknown interface'}"
    chosen, own = facts["variable"], facts["interface"]
    if chosen and own and chosen != own:
        note = f"GLOO_SOCKET_IFNAME={chosen} sends Gloo's data by another interface than the store"
        return ReportLine(name, address, "bad", note)
    if facts["address"].startswith("127.") or facts["address"] == "::1":
        note = "other hosts cannot reach this: let the store have an address on their network"
        return ReportLine(name, address, "no", note)
    elsewhere = facts["means"] and facts["address"] not in facts["means"]
    means = f"the host's own name means {', '.join(facts['means'])}" if elsewhere else ""
    return ReportLine(name, address, note=means)


def compare_versions(facts: Sequence[Facts]) -> list[ReportLine]:
    """A line for each thing that must be equal on all hosts."""
    lines = []
    for what, advice in _EQUAL.items():
        said = [str(each[what]) for each in facts]
        usual = statistics.mode(said)
        others = [
            f"{n} {each['name']} {text}"
            for n, (each, text) in enumerate(zip(facts, said, strict=True))
            if text != usual
        ]
        if others:
            lines.append(ReportLine(what, f"{usual}, but {', '.join(others)}", "bad", advice))
        else:
            lines.append(ReportLine(what, usual))
    return lines


def judge_links(facts: Sequence[Facts], links: Sequence[LinkFigures]) -> list[ReportLine]:
    """The lines on the links between hosts: all figures of few hosts, else what is unusual."""
    open_ = [link for link in links if not link.error]
    if not links:
        return [ReportLine("links", "there is a single host", "no")]
    usual_trip = statistics.median(link.trip for link in open_) if open_ else 0.0
    usual_rate = statistics.median(link.rate for link in open_) if open_ else 0.0
    lines = [ReportLine("median", _figures(usual_trip, usual_rate), note=f"of {len(open_)} links")]
    for link in links:
        line = _judge(link, facts, usual_trip, usual_rate, alone=len(links) <= 2)
        if line.state == "bad" or len(facts) <= 4:
            lines.append(line)
    return lines


def _judge(
    link: LinkFigures, facts: Sequence[Facts], trip: float, rate: float, alone: bool
) -> ReportLine:
    a, b = (f"{n} {facts[n]['name']}" for n in (link.source, link.target))
    name, figures = f"{a} → {b}", _figures(link.trip, link.rate)
    if link.error:
        note = f"open all ports between the hosts: {a} cannot reach {facts[link.target]['address']}"
        return ReportLine(name, link.error, "bad", note)
    if abs(link.clock) > _CLOCK_SECONDS:
        ahead, behind = (b, a) if link.clock > 0 else (a, b)
        note = f"the clock of {ahead} is {_span(link.clock)} ahead of that of {behind}: use NTP"
        return ReportLine(name, figures, "bad", note)
    if not alone and (link.rate * _OUTLIER < rate or link.trip > trip * _OUTLIER + 1e-3):
        return ReportLine(name, figures, "bad", "far worse than the other links")
    return ReportLine(name, figures)


def _figures(trip: float, rate: float) -> str:
    return f"{trip * 1e6:,.0f} µs there and back, {rate * 8 / 1e6:,.0f} Mbit/s"


def _span(seconds: float) -> str:
    seconds = abs(seconds)
    return f"{seconds / 3600:.1f} hours" if seconds > 5400 else f"{seconds:.1f} s"


def _try_group(store: Store, me: int, facts: Sequence[Facts]) -> ReportLine:
    """A group of a rank on each host, which adds tensors up."""
    size, begun = len(facts), time.monotonic()
    try:
        limit = timedelta(seconds=30)
        group = PrefixStore("group", store)
        dist.init_process_group(store=group, rank=me, world_size=size, timeout=limit)
        backend = dist.get_backend()
        figures = [
            (name, seconds_for(me, size, items, 5)[1])
            for name, items in (("8 bytes", 2), ("4 MiB", 1 << 20))
        ]
        dist.destroy_process_group()
    except Exception as error:  # the user wants to know any error
        return failed("all hosts", error)
    took = f"passed in {time.monotonic() - begun:.1f} s, by {backend}"
    times = ", of ".join(f"{name} in {median * 1e6:,.0f} µs" for name, median in figures)
    return ReportLine("all hosts", took, note=f"all_reduce of {times}")


def _leave(store: Store, hosts: int, me: int, bad: bool) -> bool:
    """Stay until all are done, as this host may serve the store; True if any host saw a fault."""
    store.set(f"done/{me}", str(int(bad)))
    verdicts = [store.get(f"done/{each}") for each in range(hosts)]
    with contextlib.suppress(DistError):
        if store.add("gone", 1) == hosts:
            store.set("all gone", "")
        store.wait(["all gone"], timedelta(seconds=2))
    return b"1" in verdicts
