"""A store over a Unix socket, for the processes of one user on one host."""

from __future__ import annotations

from datetime import timedelta

from tilework.store import checks
from tilework.store.address import UnixAddress
from tilework.store.client import RemoteStore
from tilework.store.contract import DEFAULT_TIMEOUT
from tilework.store.server import StoreServer, check_secret


class UnixStore(RemoteStore):
    """A store that one process serves over a Unix socket; no port is opened.

    The constructor blocks until the server answers. Only processes of the same user can take part:
    the kernel shows each side which user owns the other process.

    Args:
        address: ``@name`` for Linux's abstract namespace, which leaves nothing on disk even after
            kill -9, otherwise a path.
        is_master: Whether this process serves. It does until this store is closed.
        timeout: How long blocking methods wait, and the constructor for the server.
        secret: The job's secret, the same on all ranks; None for none.

    Raises:
        DistNetworkError: Nobody answers at the address, or it cannot be listened on, or the
            secret is wrong.

    Example:
        >>> import os
        >>> name = f"@a-job-{os.getpid()}"
        >>> with UnixStore(name, is_master=True) as served, UnixStore(name) as store:
        ...     served.set("k", "v")
        ...     store.get("k")
        b'v'
    """

    def __init__(
        self,
        address: str,
        is_master: bool = False,
        timeout: timedelta = DEFAULT_TIMEOUT,
        secret: bytes | None = None,
    ) -> None:
        checks.positive(timeout)
        check_secret(secret)
        where = UnixAddress(address)
        self.address = address
        server = StoreServer(where, secret) if is_master else None
        if server is not None:
            server.start()
        super().__init__(where, timeout, secret, server.close if server is not None else None)
        self.authenticated = True
