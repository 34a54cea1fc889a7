"""Addresses of a store's server: a TCP host and port, or a Unix socket; bind and connect."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import stat
import sys
from dataclasses import dataclass
from typing import Final

from tilework.errors import DistNetworkError
from tilework.framed import other_user_of, tune_tcp

#: Bytes that the kernel keeps of a Unix socket's name, without the terminator.
_MAX_UNIX_BYTES: Final = 107
_BACKLOG: Final = 4096
#: For tune_tcp: a host is gone after about 30 seconds.
SILENCE: Final = (10, 5, 4)


@dataclass(frozen=True)
class TcpAddress:
    """The address of a store that listens on a TCP port; ``host`` is a name, an IPv4 or IPv6
    address.
    """

    host: str
    port: int
    #: Advice for the error message when no server answers there.
    hint = (
        "Check that whoever serves it (rank 0, the launcher of node 0, `tilework store`) runs and "
        "listens there, that the host name means the same machine everywhere (not 127.0.1.1 on "
        "rank 0), and that no firewall is between."
    )

    def __post_init__(self) -> None:
        if not isinstance(self.host, str) or not self.host:
            raise ValueError(f"a store's host must be a name or an address, got {self.host!r}")
        if not isinstance(self.port, int) or not 0 <= self.port <= 65535:
            raise ValueError(
                f"a store's port must be between 0 (the system picks a free port) and 65535, got "
                f"{self.port!r}"
            )

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """This address as ``TILEWORK_STORE`` has it."""
        return f"tcp://{self}"

    @property
    def is_of_one_host(self) -> bool:
        """True if only processes of this host can reach this address."""
        try:
            resolved = self._resolve()
        except (OSError, UnicodeError):
            return False
        return all(ipaddress.ip_address(where[0]).is_loopback for _, where in resolved)

    def listen(self) -> socket.socket:
        """A new socket, on exactly the address of ``host``: on all interfaces only if it asks so.

        Raises DistNetworkError if it cannot listen.
        """
        failure = OSError()
        for family, where in self._resolve_or_raise():
            try:
                # A port whose last connections linger in TIME_WAIT is free; IPv6 is not IPv4.
                return socket.create_server(where, family=family, backlog=_BACKLOG)
            except OSError as error:
                failure = error
                if error.errno == errno.EADDRINUSE:
                    break
        why = os.strerror(failure.errno or 0)
        advice = _listen_advice(failure)
        raise DistNetworkError(f"cannot listen on {self}: {why}. {advice}") from failure

    def connect(self, timeout_seconds: float) -> socket.socket:
        """The first connection to an address that the host resolves to. Tries once; or OSError."""
        failure: OSError = OSError("the host has no address")
        for family, where in self._resolve():
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.settimeout(timeout_seconds)
                sock.connect(where)
                if sock.getsockname() == sock.getpeername():
                    # Port chosen by the kernel for this end happened to be the very one sought.
                    raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
                tune_tcp(sock, *SILENCE)
                return sock
            except OSError as error:
                sock.close()
                failure = error
        raise failure

    def bound(self, listener: socket.socket) -> TcpAddress:
        """This address with the port of ``listener``, which the system picked if the port was 0."""
        return TcpAddress(self.host, listener.getsockname()[1])

    def refuses(self, peer: socket.socket) -> str:
        """The reason to refuse the process at the other end of ``peer``; empty if there is none."""
        return ""

    def released(self) -> None:
        """Remove the file that the closed listening socket has left behind: here there is none."""

    def _resolve(self) -> list[tuple[int, tuple[str, int]]]:
        infos = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        # IPv4 first on every rank: then "localhost" means one thing to server and clients.
        infos.sort(key=lambda info: info[0] != socket.AF_INET)
        return [(info[0], info[4]) for info in infos]  # type: ignore[misc]

    def _resolve_or_raise(self) -> list[tuple[int, tuple[str, int]]]:
        try:
            return self._resolve()
        except (OSError, UnicodeError) as error:
            raise DistNetworkError(
                f"cannot listen on {self}: the host name cannot be resolved ({error}). Use an "
                "address of this machine."
            ) from error


@dataclass(frozen=True)
class UnixAddress:
    """A Unix socket: ``@name`` in Linux's abstract namespace, a path otherwise."""

    name: str
    is_of_one_host = True
    hint = (
        "Check that the process that serves the store (the launcher, or rank 0) is running, on "
        "this host and in this network namespace, and uses the same address."
    )

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name in ("", "@") or "\0" in self.name:
            raise ValueError(f"a Unix socket's address is @name or a path, got {self.name!r}")
        if self.abstract and sys.platform != "linux":
            raise ValueError(f"abstract socket names are Linux's: use a path, not {self.name!r}")
        if len(os.fsencode(self.name)) > _MAX_UNIX_BYTES:
            raise ValueError(
                f"a Unix socket's address takes at most {_MAX_UNIX_BYTES} bytes, got "
                f"{len(os.fsencode(self.name))}: {self.name!r}. Use a shorter path, or @name."
            )

    def __str__(self) -> str:
        return self.name

    @property
    def url(self) -> str:
        return f"unix:{self.name}"

    @property
    def abstract(self) -> bool:
        """True if the socket is in Linux's abstract namespace, and leaves no file on disk."""
        return self.name.startswith("@")

    def listen(self) -> socket.socket:
        """Listen at the name; replace a socket file that a killed server left at the path."""
        listener: socket.socket | None = None
        try:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                listener.bind(self._kernel_name)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or self.abstract or self._answers():
                    raise
                os.unlink(self.name)
                listener.bind(self._kernel_name)
            if not self.abstract:
                os.chmod(self.name, 0o600)
            listener.listen(_BACKLOG)
        except OSError as error:
            if listener is not None:
                listener.close()
            advice = _listen_advice(error)
            raise DistNetworkError(
                f"cannot listen on {self}: {error.strerror}. {advice}"
            ) from error
        return listener

    def connect(self, timeout_seconds: float) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_seconds)
            sock.connect(self._kernel_name)
        except BaseException:
            sock.close()
            raise
        return sock

    def bound(self, listener: socket.socket) -> UnixAddress:
        return self

    def refuses(self, peer: socket.socket) -> str:
        user = other_user_of(peer)  # where unknown, the path's mode, 0600, has to do
        if user is None:
            return ""
        return f"it belongs to user {user}, this process to user {os.geteuid()}"

    def released(self) -> None:
        if not self.abstract:
            with contextlib.suppress(OSError):
                os.unlink(self.name)

    @property
    def _kernel_name(self) -> bytes:
        name = os.fsencode(self.name)
        return b"\0" + name[1:] if self.abstract else name

    def _answers(self) -> bool:
        """True if a server may still use the path; False if a socket there refuses connections."""
        try:
            if not stat.S_ISSOCK(os.lstat(self.name).st_mode):
                return True
            self.connect(1.0).close()
        except ConnectionRefusedError:
            return False
        except OSError:
            return True  # Busy, or not ours to touch.
        return True


#: An address at which a store's server listens and to which clients connect.
Address = TcpAddress | UnixAddress


def _listen_advice(error: OSError) -> str:
    advice = {
        errno.EADDRINUSE: "Another process listens there, perhaps an earlier job: end it, or use "
        "another port (0 picks a free one) or name.",
        errno.EADDRNOTAVAIL: "It is not an address of this machine: rank 0 must run on that host, "
        "and the host name must mean an address that this machine has.",
        errno.EACCES: "Ports below 1024 and foreign directories need privileges: use another.",
        errno.EMFILE: "This process may open no more files: raise the limit (ulimit -n).",
        errno.ENOENT: "The directory of the path does not exist: make it first.",
    }
    return advice.get(error.errno or 0, "Use another address.")
