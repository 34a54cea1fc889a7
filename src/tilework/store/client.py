"""The client of a store's server: each operation is one request and one answer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta

from tilework.errors import DistNetworkError, DistStoreError
from tilework.store import checks, wire
from tilework.store.address import Address
from tilework.store.contract import Data
from tilework.store.late_notice import KeyWait
from tilework.store.pool import Pool
from tilework.store.requesting import RequestStore
from tilework.store.wire import Code, WireMessage


class RemoteStore(RequestStore):
    """A client of a store's server; base class of :class:`TCPStore` and :class:`UnixStore`."""

    authenticated = is_of_one_host = False
    secret: bytes | None = None

    def __init__(
        self,
        where: Address,
        timeout: timedelta,
        secret: bytes | None,
        release: Callable[[], None] | None = None,
    ) -> None:
        """Connect to the server at ``where``, within ``timeout``.

        ``release`` is called when this store is closed, or if it cannot connect.
        """
        super().__init__(timeout)
        self.secret, self.authenticated = secret, secret is not None
        self._pool = Pool(where, secret)
        self.is_of_one_host = where.is_of_one_host
        # Also at exit and when dropped: a forgotten store must not keep a port.
        self._finalizer = weakref.finalize(self, _close_both, self._pool.close, release)
        try:
            self._pool.connect(checks.seconds(timeout))
        except BaseException:
            self._finalizer()
            raise

    @property
    def why_gone(self) -> str:
        """The reason if the server has closed the connections, or its process has ended."""
        return self._pool.why_gone()

    @property
    def url(self) -> str:
        """The server's address, as ``TILEWORK_STORE`` has it."""
        return self._pool.where.url

    def append_on_disconnect(
        self, key: str, value: Data, greeting: tuple[str, Data] | None = None
    ) -> Callable[[], None]:
        fields = [checks.key_bytes(key), checks.data_bytes(value)]
        if greeting is not None:
            fields += [checks.key_bytes(greeting[0]), checks.data_bytes(greeting[1])]
        return self._hold(wire.encode(Code.APPEND_ON_DISCONNECT, fields))

    def close(self) -> None:
        """Close the connections, and the server if this store started it; waiting threads raise."""
        self._finalizer()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self._pool.where)!r})"

    def _hold(self, request: bytes, until_closed: bool = False) -> Callable[[], None]:
        """Send a request whose effect comes when the connection closes; returns the undo."""
        revocation = wire.encode(Code.APPEND_ON_DISCONNECT, ())
        limit = checks.seconds(self._timeout)
        return self._pool.hold(request, revocation, limit, revocation if until_closed else b"")

    def _send(
        self, code: Code, fields: Sequence[bytes], lines: KeyWait | None = None, left: float = 0.0
    ) -> WireMessage:
        seconds = checks.seconds(self._timeout) if lines is None else left
        answer = self._pool.ask(wire.encode(code, fields), seconds, lines)
        return answer if answer.code == Code.TIMEOUT else self._checked(answer)

    def _checked(self, answer: WireMessage) -> WireMessage:
        if answer.code == Code.ERROR:
            raise DistStoreError(b" ".join(answer.fields).decode(errors="replace"))
        if answer.code not in (Code.OK, Code.TOO_LONG):
            raise DistNetworkError(
                f"the store server at {self._pool.where} sent an unexpected answer "
                f"({answer.code}): check that all ranks run the same version of tilework"
            )
        return answer


def _close_both(close_pool: Callable[[], None], release: Callable[[], None] | None) -> None:
    close_pool()
    if release is not None:
        release()
