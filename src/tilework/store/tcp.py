"""A store over TCP, for ranks on any hosts."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from datetime import timedelta
from functools import partial

from tilework.errors import DistError, StoreTimeoutError
from tilework.forks import watch_forks
from tilework.store import checks, wire
from tilework.store.address import TcpAddress
from tilework.store.arrivals import Arrivals
from tilework.store.checks import answers_within
from tilework.store.client import RemoteStore
from tilework.store.contract import DEFAULT_TIMEOUT
from tilework.store.late_notice import KeyWait
from tilework.store.server import StoreServer, check_secret
from tilework.store.wire import Code

#: The names of workers that ended without closing their store.
_LOST_KEY = "tilework/lost-workers"
#: The reason for which the master ends the store, and the names of workers that have heard it.
_GIVEN_UP_KEY, _HEARD_KEY = "tilework/master-gave-up", "tilework/heard-master"
#: Seconds for which it stays at most until they have.
_PARTING_SECONDS = 1.0


class TCPStore(RemoteStore):
    """A store that one rank serves over TCP and every rank uses.

    The constructor blocks until the server answers, and on the master until the workers came. The
    server listens on exactly the address that ``host`` means: 127.0.0.1 cannot be reached from
    other hosts. With a ``secret`` both sides prove that they know it; nothing is encrypted. When
    the server ends, all calls raise DistNetworkError at once, also those that wait.

    Args:
        host: Name or address of the server's machine.
        port: The server's port; on the master, 0 picks a free port (see :attr:`port`).
        world_size: How many stores will be made, the master's included, where known.
        is_master: Whether this process serves. It does until this store is closed.
        timeout: How long blocking methods wait, and the constructor for server and workers.
        wait_for_workers: Whether the master waits until ``world_size`` stores were made.
        multi_tenant: Whether to share the server that this process may have at this address.
        secret: The job's secret, the same on all ranks; None for none.
        use_libuv: Ignored. torch's TCPStore has this argument; here is one kind of server.

    Raises:
        DistNetworkError: Nobody answers at the address, or it cannot be listened on, or what
            answers is not this job's server (another service, a wrong secret).
        StoreTimeoutError: Workers are missing; it says how many came.

    Example:
        >>> from tilework.store import TCPStore
        >>> with TCPStore("127.0.0.1", 0, is_master=True) as served:
        ...     served.set("k", "v")
        ...     with TCPStore("127.0.0.1", served.port) as store:
        ...         store.get("k")
        b'v'
    """

    arrival_name = ""

    def __init__(
        self,
        host: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        secret: bytes | None = None,
        *,
        use_libuv: bool = True,
    ) -> None:
        checks.positive(timeout)
        check_secret(secret)
        where = TcpAddress(host, port)
        if not is_master and port == 0:
            raise ValueError("port 0 picks a free port on the master; a client must name the port")
        server = _tenants.serve(where, secret, multi_tenant) if is_master else None
        release = None
        if server is not None:
            where, release = TcpAddress(host, server.port), partial(_tenants.give_back, server)
        self.host, self.port = where.host, where.port
        self._expected, self.arrival_name = world_size, os.urandom(16).hex()
        with answers_within(timeout):
            super().__init__(where, timeout, secret, release)
            try:
                self._join(world_size if is_master and wait_for_workers else None)
            except BaseException:
                self.close()
                raise

    def arrivals(self) -> Arrivals | None:
        """Counts of the stores made at this server; None where ``world_size`` was not given."""
        if self._expected is None:
            return None
        none = wire.encode_number(0)
        came = wire.decode_number(self._send(Code.WAIT_WORKERS, (none, none)).fields[0])
        lost = self._words(_LOST_KEY)
        given_up = self.get(_GIVEN_UP_KEY).decode() if self.check([_GIVEN_UP_KEY]) else ""
        if given_up:
            self.append(_HEARD_KEY, f"{self.arrival_name} ")
        return Arrivals(self._expected, came, lost, given_up)

    def _join(self, wait_for: int | None) -> None:
        if self._expected is None:
            self._send(Code.JOIN, [self.arrival_name.encode()])
        else:
            request = wire.encode(Code.JOIN, (self.arrival_name.encode(), _LOST_KEY.encode()))
            self._hold(request, until_closed=True)
        if wait_for is None or wait_for <= 1:
            return
        left = checks.seconds(self._timeout)
        request = wire.encode(
            Code.WAIT_WORKERS, (wire.encode_number(int(left * 1000)), wire.encode_number(wait_for))
        )
        answer = self._pool.ask(request, left, KeyWait(self, what=f"{wait_for} workers"))
        if answer.code == Code.TIMEOUT:
            came = wire.decode_number(answer.fields[0])
            error = StoreTimeoutError(
                f"Timeout: waited {left:g} s for {wait_for} workers to join the store at "
                f"{self._pool.where}; {came} came, this one included. Check that all ranks were "
                "started, and with the same address."
            )
            self._give_up(error, came)
            raise error
        self._checked(answer)

    def _give_up(self, error: StoreTimeoutError, came: int) -> None:
        """Write ``error`` into the store, and wait a second until the workers read it."""
        with contextlib.suppress(DistError):
            self.set(_GIVEN_UP_KEY, str(error))
            deadline = checks.Deadline(_PARTING_SECONDS)
            while not deadline.passed:
                if len(self._words(_LOST_KEY) | self._words(_HEARD_KEY)) >= came - 1:
                    return
                time.sleep(0.02)

    def _words(self, key: str) -> frozenset[str]:
        """The words, separated by spaces, in the value at ``key``; empty if there is no value."""
        return frozenset(self.get(key).decode().split() if self.check([key]) else ())


class _Tenants:
    """The servers of this process, and how many stores use each."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._users: dict[StoreServer, int] = {}
        self._shared: dict[tuple[TcpAddress, bytes | None], StoreServer] = {}
        watch_forks(self)

    def serve(self, where: TcpAddress, secret: bytes | None, shared: bool) -> StoreServer:
        """A share of a server at ``where``: a new server, or if ``shared`` a running server."""
        with self._lock:
            server = self._shared.get((where, secret)) if shared else None
            if server is None:
                server = StoreServer(where, secret)
                server.start()
                self._users[server] = 0
                if shared:
                    self._shared[TcpAddress(where.host, server.port), secret] = server
            self._users[server] += 1
            return server

    def give_back(self, server: StoreServer) -> None:
        """Give one share back; the last one closes the server."""
        with self._lock:
            self._users[server] -= 1
            if self._users[server]:
                return
            del self._users[server]
            self._shared = {key: at for key, at in self._shared.items() if at is not server}
        server.close()

    def after_fork_in_child(self) -> None:
        """Forget the shared servers, which run in the parent process only."""
        self._lock = threading.RLock()
        self._shared.clear()


_tenants = _Tenants()
