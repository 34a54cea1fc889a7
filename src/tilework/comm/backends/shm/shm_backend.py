"""The ``shm`` backend: ranks are processes (or threads) of one host, sharing one sealed memfd.

The core moves data (csrc/, shm_group.py); this module makes groups. Rank 0 creates the segment and
listens on an abstract Unix socket, whose name it puts in the store. Each rank connects, and both
sides check that the other runs as the same user. The rank proves that it read the store (nonce),
and receives the segment's descriptor. Whether ranks share a host is found out by sharing memory,
never guessed from names. A failure on one rank reaches all ranks through a verdict.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import secrets
import selectors
import socket
import time
from datetime import timedelta
from typing import Any

from tilework.comm.backend import DistributedBackendOptions, core_error
from tilework.comm.backends.shm.calibration import group_tunables
from tilework.comm.backends.shm.shm_group import ShmEngine, ShmGroup
from tilework.comm.elastic.registers import MemoryRegisters
from tilework.comm.elastic.watched_store import look
from tilework.cores import affinity, cpu_quota
from tilework.errors import DistBackendError, DistStoreError, PeerLostError, StoreTimeoutError
from tilework.framed import MAX_CALLERS, Door, knock, other_user_of
from tilework.optional_core import core as _core

_READY, _GO = b"R", b"G"
#: Errors that mean that ranks cannot reach each other's memory; other errors are failures of one
#: rank.
_UNREACHABLE = (errno.ECONNREFUSED, errno.ENOENT, errno.EACCES, errno.EPERM, errno.ECONNRESET)
# Verdicts: success; ranks cannot share memory; another failure; a rank ended, or could not make
# its end, with the rank's number. All but the first come with a reason.
_FINE, _ELSEWHERE, _FAILED = "fine", "elsewhere", "failed"
_LOST, _BROKEN = "lost", "broken"
#: Rank 0 gives a verdict before it hangs up, unless it died.
_VERDICT_TIMEOUT = timedelta(seconds=1.5)
#: How long rank 0 waits for the others before it calibrates beside them.
_LOADING_TIMEOUT = timedelta(seconds=5)


class CannotShareMemoryError(DistBackendError):
    """Ranks of a shm group are not on one host, or may not share memory there."""

    #: Shows the maker of the default group that another backend may serve.
    elsewhere = True


def create_shm_group(request: DistributedBackendOptions, options: Any) -> ShmGroup:
    """Make this rank's end of a group. Collective; blocks until all ranks joined, or raises a
    DistBackendError: CannotShareMemoryError for other hosts or users.
    """
    missing = core_error()
    if missing is not None or _core is None:
        raise DistBackendError(f"backend 'shm' is not usable: {missing}")
    rank, size = request.group_rank, request.group_size
    core, registers = _host(request) if rank == 0 else _join(request)
    try:
        group = ShmGroup(ShmEngine(core, size), rank, size, request.timeout)
    except BaseException:  # no memory, say
        _close((core, registers))
        raise
    group.registers = registers
    return group


#: This rank's end of the core's group, and the registers that outlive ranks.
_Ends = tuple["_core.Group", MemoryRegisters]


def _host(request: DistributedBackendOptions) -> _Ends:
    """Make rank 0's end of a group: create the segment (the shared memory), hand it to the other
    ranks, and inform all whether that succeeded.
    """
    nonce = secrets.token_bytes(16)
    # Every user can read socket names, so the nonce must not be part of the name.
    name = f"tilework-shm-{secrets.token_hex(16)}"
    ranks = request.group_size
    tunables = group_tunables(ranks, _cpus_of_all(request), lambda: _await_others(request))
    with contextlib.ExitStack() as always, contextlib.ExitStack() as undo:
        fd = _core.create_segment(ranks, _core.DEFAULT_SLOT_BYTES, nonce, tunables)
        always.callback(os.close, fd)
        registers_fd = MemoryRegisters.create()
        registers = MemoryRegisters(registers_fd)
        undo.callback(registers.close)
        group = _take_end(fd, 0, ranks, nonce)
        undo.callback(group.close)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"\0{name}")
            listener.listen(MAX_CALLERS)
            request.store.set("shm/host", f"{name} {nonce.hex()} {_host_identity()}")
            door = Door(listener, nonce, range(1, ranks))
            reception = _Reception(request, door, (fd, registers_fd))
            verdict = _FAILED
            try:
                verdict = reception.receive_all()
                request.store.set("shm/verdict", verdict)
            finally:
                reception.dismiss(go=verdict == _FINE)
        if verdict != _FINE:
            raise _error_of(verdict)
        undo.pop_all()
        return group, registers


def _await_others(request: DistributedBackendOptions) -> None:
    """Wait a few seconds for the other ranks to come. Until then they use the cores to load
    modules.
    """
    others = [f"shm/here/{rank}" for rank in range(1, request.group_size)]
    with contextlib.suppress(StoreTimeoutError):
        request.store.wait(others, min(_LOADING_TIMEOUT, request.timeout / 2))


def _cpus_of_all(request: DistributedBackendOptions) -> frozenset[int]:
    """The CPUs of all ranks together; waits for others only if this rank has too few."""
    cpus, store = affinity(), request.store
    if len(cpus) >= min(request.group_size, os.cpu_count() or 1):
        return cpus
    _await_others(request)
    for rank in range(1, request.group_size):
        if store.check([f"shm/here/{rank}"]):
            cpus |= {int(cpu) for cpu in store.get(f"shm/here/{rank}").split()}
    return cpus


def _error_of(verdict: str) -> DistBackendError:
    """The error that every rank raises for rank 0's ``verdict`` (whether the group is made, or why
    not).
    """
    kind, _, reason = verdict.partition(":")
    if kind in (_LOST, _BROKEN):
        rank, _, reason = reason.partition(":")
        error = PeerLostError if kind == _LOST else DistBackendError
        return error(reason, ranks=[int(rank)] if rank.isascii() and rank.isdecimal() else [])
    return CannotShareMemoryError(reason) if kind == _ELSEWHERE else DistBackendError(reason)


class _Reception:
    """Rank 0's side of making a group: accepts the other ranks at a socket, and hands them the
    segment.
    """

    def __init__(
        self, request: DistributedBackendOptions, door: Door, fds: tuple[int, int]
    ) -> None:
        self._request, self._door, self._fds = request, door, fds
        self._joined: dict[int, socket.socket] = {}
        self._ready: set[int] = set()

    def receive_all(self) -> str:
        """Wait until every rank has mapped the segment; return the verdict."""
        request = self._request
        limit = request.timeout.total_seconds()
        deadline = time.monotonic() + limit
        with selectors.DefaultSelector() as selector:
            selector.register(self._door, selectors.EVENT_READ, None)
            while len(self._ready) < request.group_size - 1:
                for key, _ in selector.select(0.1):
                    lost = self._serve(selector, key)
                    if lost is not None:
                        rank = request.global_ranks_in_group[lost]
                        ended = f"{_LOST}:{rank}:lost rank {rank}: rank {rank} ended while joining"
                        return self._refusal() or ended
                refusal = self._refusal()
                if refusal:
                    return refusal
                look(request.store)
                if time.monotonic() > deadline:
                    return f"{_FAILED}:{self._late(limit)}"
        return _FINE

    def _refusal(self) -> str:
        """The verdict that a rank has left in the store because it could not join; "" if there is
        none.
        """
        store = self._request.store
        return store.get("shm/refused").decode() if store.check(["shm/refused"]) else ""

    def _serve(self, selector: selectors.BaseSelector, key: selectors.SelectorKey) -> int | None:
        """Handle the connection of ``key``, which is ready; return the rank that has ended there,
        if any.
        """
        rank = key.data
        if rank is None:
            for joined, connection in self._door.admit(0).items():
                try:
                    socket.send_fds(connection, [b"S"], list(self._fds))
                except OSError:
                    connection.close()  # the rank reports why it cannot join, if it still can
                    continue
                self._joined[joined] = connection
                selector.register(connection, selectors.EVENT_READ, joined)
        elif not _is_ready(self._joined[rank]):
            return int(rank)
        else:
            self._ready.add(rank)
            selector.unregister(key.fileobj)
        return None

    def _late(self, limit: float) -> str:
        ranks = self._request.global_ranks_in_group
        missing = [ranks[r] for r in range(1, self._request.group_size) if r not in self._ready]
        return (
            f"ranks {missing} did not join group {self._request.group_id!r} within {limit:g} s; "
            f"check that they were started and make the same calls"
        )

    def dismiss(self, go: bool) -> None:
        """Close all connections. With ``go``, first let the ranks that have joined continue;
        without, they read the verdict in the store.
        """
        self._door.close()
        for connection in self._joined.values():
            try:
                if go:
                    connection.send(_GO)
            except OSError:
                pass  # the rank just ended: the group's first operation will say so
            connection.close()


def _is_ready(connection: socket.socket) -> bool:
    """Read from a rank's connection: True if the rank says that it has mapped the segment; False if
    the rank has ended.
    """
    try:
        return connection.recv(1) == _READY
    except OSError:
        return False


def _join(request: DistributedBackendOptions) -> _Ends:
    """Make this rank's end of a group, on ranks other than 0: get the segment from rank 0, and wait
    for the verdict.
    """
    store = request.store
    store.set(f"shm/here/{request.group_rank}", " ".join(map(str, sorted(affinity()))))
    name, nonce_hex, identity = store.get("shm/host").decode().split(" ", 2)
    with contextlib.ExitStack() as undo:
        ends = None
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            try:
                ends = _enter(connection, name, bytes.fromhex(nonce_hex), request)
                undo.callback(_close, ends)
                connection.send(_READY)
                going = connection.recv(1) == _GO
            except TimeoutError:  # rank 0's time is up, too: rank 0 says why, or has just gone on
                going = False
            except (OSError, ValueError) as error:
                # Report before the connection ends: rank 0 counts a silent end as a death.
                going = False
                _refuse(request, identity, error)
        verdict = _FINE if going else _verdict(request)
        if ends is None or verdict != _FINE:
            raise _error_of(verdict)
        undo.pop_all()
        return ends


def _verdict(request: DistributedBackendOptions) -> str:
    """Rank 0's verdict on whether the group is made, from the store; the verdict of a failure if
    none comes in time.
    """
    try:
        request.store.wait(["shm/verdict"], _VERDICT_TIMEOUT)
        return request.store.get("shm/verdict").decode()
    except DistStoreError:
        return f"{_FAILED}:rank 0 did not say in time whether the group is made: it has stopped"


def _close(ends: _Ends) -> None:
    for end in ends:
        end.close()


def _enter(
    connection: socket.socket, name: str, nonce: bytes, request: DistributedBackendOptions
) -> _Ends:
    """Connect to rank 0, prove to be a rank of the job, and map the segment."""
    connection.connect(f"\0{name}")
    if other_user_of(connection) is not None:
        raise PermissionError("the first rank of the group runs as another user")
    knock(connection, nonce, request.group_rank)
    connection.settimeout(request.timeout.total_seconds())
    return _map(connection, request.group_rank, request.group_size, nonce)


def _take_end(fd: int, rank: int, size: int, nonce: bytes) -> _core.Group:
    """Make the core's object for ``rank`` in the segment at ``fd``; it shows the other ranks how
    many cores this rank may use.
    """
    _core.set_core_limit(math.ceil(cpu_quota() or 0))
    return _core.Group(fd, rank, size, nonce)


def _map(connection: socket.socket, rank: int, size: int, nonce: bytes) -> _Ends:
    _, fds, flags, _ = socket.recv_fds(connection, 1, 2)
    try:
        if len(fds) < 2 and flags & socket.MSG_CTRUNC:
            raise OSError(
                errno.EMFILE, "too many open files: no descriptor is left for the shared memory"
            )
        if len(fds) < 2:
            raise ConnectionError(
                "rank 0 closed the connection before it sent the shared memory: see rank 0's error"
            )
        group = _take_end(fds[0], rank, size, nonce)
        try:
            return group, MemoryRegisters(fds.pop())
        except BaseException:
            group.close()
            raise
    finally:
        for fd in fds:
            os.close(fd)


def _refuse(request: DistributedBackendOptions, identity: str, error: Exception) -> None:
    """Report to rank 0, and through it to all ranks, that this rank cannot join the group
    because of ``error``.
    """
    ranks = request.global_ranks_in_group
    me, own = ranks[request.group_rank], _host_identity()
    where = "on one host" if own == identity else f"on different hosts ({identity} and {own})"
    if isinstance(error, OSError) and error.errno and error.errno not in _UNREACHABLE:
        verdict = (
            f"{_BROKEN}:{me}:rank {me} could not make its end of group {request.group_id!r}: "
            f"{type(error).__name__}: {error}"
        )
    else:
        verdict = (
            f"{_ELSEWHERE}:rank {me} cannot share memory with rank {ranks[0]}, {where}: {error}. "
            f"Use backend 'gloo' for ranks that do not share a host"
        )
    try:
        request.store.set("shm/refused", verdict)
    except DistStoreError as gone:
        raise DistBackendError(
            f"cannot join the first rank of the group: {error}; nor inform the others: {gone}"
        ) from error


def _host_identity() -> str:
    """A name of this host, for messages only."""
    return f"{socket.gethostname()}/{os.stat('/proc/self/ns/net').st_ino}"
