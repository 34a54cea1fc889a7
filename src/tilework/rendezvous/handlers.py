"""The built-in ways to meet: env://, tcp://, file:// and unix:."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final
from urllib.parse import SplitResult, parse_qs, quote, unquote, urlencode, urlsplit

from tilework.errors import DistError, DistNetworkError, PeerLostError
from tilework.rendezvous.environment import Settings, detect_environment, integer
from tilework.rendezvous.liveness import EndedRanks, process_identity
from tilework.rendezvous.siblings import MultiprocessingChildren, Siblings
from tilework.store import (
    DEFAULT_TIMEOUT,
    FileStore,
    HashStore,
    PrefixStore,
    Store,
    StoreServer,
    TCPStore,
    UnixStore,
)
from tilework.store.internal import (
    Address,
    LateNotice,
    TcpAddress,
    UnixAddress,
    positive,
    ranks_in_words,
    while_connecting,
)

#: "Not given", as in torch.
UNSET = -1


@dataclass(frozen=True)
class RankPlace:
    """A global rank and the number of ranks; -1 stands for a number that was not given."""

    rank: int = UNSET
    world_size: int = UNSET

    def __post_init__(self) -> None:
        for name, least in (("rank", 0), ("world_size", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be an integer, got {value!r}")
            if value < least and value != UNSET:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if UNSET not in (self.rank, self.world_size) and self.rank >= self.world_size:
            raise ValueError(
                f"rank must be less than world_size, got rank {self.rank} of {self.world_size}: "
                "ranks count from 0"
            )

    def needed(self, url: str) -> RankPlace:
        """This object itself; raises ValueError, which says how to give it, if a number is
        missing.
        """
        for name in ("rank", "world_size"):
            if getattr(self, name) == UNSET:
                raise ValueError(
                    f"{url!r} needs a {name}: pass {name}=, or add ?{name}=… to the URL"
                )
        return self


def split_url(url: str) -> SplitResult:
    """The parts of ``url``. Raises TypeError or ValueError if it is no URL with a scheme."""
    if not isinstance(url, str):
        raise TypeError(f"a rendezvous URL must be a str, got {type(url).__name__}: {url!r}")
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ValueError(f"{url!r} is not a URL: {error}") from None
    if not parts.scheme:
        raise ValueError(
            f"{url!r} has no scheme: expected something like env://, tcp://host:port or "
            "file:///path"
        )
    return parts


def query_of(url: str) -> dict[str, str]:
    """The arguments in the query of ``url``. Raises ValueError if a name comes twice."""
    text = split_url(url).query
    try:
        query = parse_qs(text, keep_blank_values=True, strict_parsing=bool(text))
    except ValueError:
        raise ValueError(f"the query of {url!r} must look like ?rank=0&world_size=2") from None
    for name, values in query.items():
        if len(values) > 1:
            raise ValueError(f"{url!r} gives {name} twice")
    return {name: values[0] for name, values in query.items()}


def merge(url: str, place: RankPlace) -> str:
    """``url`` with the numbers of ``place`` in the query. Raises ValueError if both disagree."""
    query = query_of(url)
    for name in ("rank", "world_size"):
        value = getattr(place, name)
        if value == UNSET:
            continue
        if query.get(name, str(value)) != str(value):
            raise ValueError(
                f"{url!r} says {name}={query[name]}, the argument says {name}={value}: give it once"
            )
        query[name] = str(value)
    if not query:
        return url
    # Not urlunsplit: it would take the slashes from env://.
    return f"{url.partition('?')[0]}?{urlencode(query, quote_via=quote)}"


def place_of(url: str) -> RankPlace:
    """The rank and world size in the query of ``url``; ValueError if it has other arguments."""
    query = query_of(url)
    unknown = sorted(set(query) - {"rank", "world_size"})
    if unknown:
        raise ValueError(
            f"{url!r} has unknown arguments {', '.join(unknown)}: expected rank and world_size"
        )
    numbers: dict[str, int] = {}
    for name, text in query.items():
        try:
            numbers[name] = int(text)
        except ValueError:
            raise ValueError(f"{name} in {url!r} must be an integer, got {text!r}") from None
    return RankPlace(**numbers)


class ServerWait:
    """Watches the other ranks while this rank waits for the store to be served.

    Within :meth:`during` the wait raises PeerLostError if another rank has ended. A wait that lasts
    long is reported on stderr. ``where`` is the address for messages ("": from the environment);
    ``one_host``: only processes of this host can reach it.
    """

    def __init__(self, place: RankPlace, where: str, one_host: bool) -> None:
        self._rank = place.rank
        named = "" if where or _uses_launchers_store() else os.environ.get("MASTER_ADDR", "")
        of_job = f"of this job at MASTER_ADDR={named}" if named else "of this job"
        self._where = f"at {where}" if where else of_job
        self._who = f"rank 0, which is to serve the store {self._where}"
        if not where and _uses_launchers_store():
            url = os.environ["TILEWORK_STORE"]
            self._who = f"the launcher or `tilework store` to serve the store at {url}"
        self._others = [rank for rank in range(place.world_size) if rank != place.rank]
        self._siblings = Siblings.of(place.rank, place.world_size)
        self._children = MultiprocessingChildren.of_this_process() if one_host else None
        # Now: while it connects to the store, it can connect to no other.
        self._launcher = EndedRanks.at_launcher(place.rank, place.world_size)
        self._notice = LateNotice(time.monotonic())

    def during(self) -> AbstractContextManager[None]:
        """The context manager within which the caller makes the store."""
        return while_connecting(self._meanwhile)

    def _meanwhile(self, reason: str) -> None:
        ended = self._siblings.ended(self._others) if self._siblings else set()
        if self._launcher is not None:
            with contextlib.suppress(DistError):
                ended |= self._launcher.among(self._others)
        if ended:
            raise self._lost(ranks_in_words(sorted(ended)), ended, reason)
        if self._children is not None:
            others = self._others
            count = self._children.ended(len(others) + 1, [process_identity()], len(others))
            if count:
                which = "" if count == len(others) else "one of "
                raise self._lost(which + ranks_in_words(others), others, reason)
        if self._notice.due(time.monotonic()):
            self._notice.tell(f"rank {self._rank} waits for {self._who} ({reason})")

    def _lost(self, which: str, ranks: Collection[int], reason: str) -> PeerLostError:
        return PeerLostError(
            f"rank {self._rank}: lost {which} before the job's ranks met: a process "
            f"ended before it joined, or served the store {self._where} ({reason}); look at "
            "the output of that rank",
            ranks=sorted(ranks),
        )


_Meeting = Iterator[tuple[Store, int, int]]

#: Advice for a variable that is missing.
_ADVICE: Final = {
    "RANK": "this process's number, from 0",
    "WORLD_SIZE": "how many processes take part",
    "MASTER_ADDR": "the host of rank 0 (127.0.0.1 if all ranks are on one host)",
    "MASTER_PORT": "a free port on the host of rank 0, such as 29500",
}

#: Ports derived from a SLURM job's number lie here: below those that kernels hand out.
_FIRST_PORT: Final = 15000
_PORTS: Final = 15000

#: Servers that this process, as rank 0, holds until it ends. A job may form a group, destroy it and
#: form it again; a rank that is early at the second meeting must not find the server of the first
#: meeting just before it closes. By process, since a forked child has none of them.
_held: dict[tuple[int, Address, bytes | None], StoreServer] = {}

#: Processes that have said that they are alone: this one, or that which it was forked from.
_said_alone: set[int] = set()


def tcp_rendezvous(url: str, timeout: timedelta, secret: bytes | None = None) -> _Meeting:
    """Yield a store, rank and world size for ``tcp://host:port``, where rank 0 serves the store."""
    parts = split_url(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port or parts.path not in ("", "/"):
        raise ValueError(f"expected tcp://host:port with a port from 1 to 65535, got {url!r}")
    place = place_of(url).needed(url)
    secret = _secret() if secret is None else secret
    # Workers are not waited for: the caller's barrier does, and can name those that are missing.
    one_host = TcpAddress(host, port).is_of_one_host
    with ServerWait(place, f"{host}:{port}", one_host).during():
        store = TCPStore(
            host,
            port,
            place.world_size,
            is_master=place.rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            secret=secret,
        )
    yield store, place.rank, place.world_size


def unix_rendezvous(url: str, timeout: timedelta, secret: bytes | None = None) -> _Meeting:
    """Yield store, rank and world size for ``unix:@name`` or ``unix:/path``; rank 0 serves."""
    parts = split_url(url)
    name = unquote(parts.netloc + parts.path)
    if not name.startswith(("@", "/")):
        raise ValueError(f"expected unix:@name or unix:/path, got {url!r}")
    place = place_of(url).needed(url)
    secret = _secret() if secret is None else secret
    with ServerWait(place, name, one_host=True).during():
        store = UnixStore(name, place.rank == 0, timeout, secret)
    yield store, place.rank, place.world_size


def file_rendezvous(url: str, timeout: timedelta) -> _Meeting:
    """Yield a FileStore, rank and world size for ``file:///path``."""
    parts = split_url(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ValueError(
            f"expected file:///path with an absolute path (three slashes), got {url!r}"
        )
    place = place_of(url).needed(url)
    store = FileStore(unquote(parts.path), place.world_size, timeout)
    yield store, place.rank, place.world_size


def env_rendezvous(url: str, timeout: timedelta, secret: bytes | None = None) -> _Meeting:
    """Yield a store, rank and world size for ``env://``, as the environment variables say."""
    parts = split_url(url)
    if parts.netloc or parts.path:
        raise ValueError(f"expected env:// and nothing but a query behind it, got {url!r}")
    settings, asked = detect_environment(), place_of(url)
    if settings is None and _alone(asked):
        _say_alone()
        yield HashStore(), 0, 1
        return
    _check_launched(asked, settings)
    place = _place(asked, settings)
    secret = _secret() if secret is None else secret
    master = os.environ.get("MASTER_ADDR")
    one_host = TcpAddress(master, 0).is_of_one_host if master else False
    with ServerWait(place, "", one_host).during():
        store = _env_store(place, settings, timeout, secret)
    yield store, place.rank, place.world_size


def _alone(asked: RankPlace) -> bool:
    """True if this process is rank 0 of 1: ``asked`` and the environment name no other ranks."""
    return asked.rank in (UNSET, 0) and asked.world_size in (UNSET, 1) and not _is_launched()


def _is_launched() -> bool:
    return any(name in os.environ for name in (*_ADVICE, "LOCAL_RANK", "TILEWORK_STORE"))


def starting(ranks: int) -> str:
    """The command to start this program on ``ranks`` ranks, for messages ("tilework run -n 2 ...").

    Empty if a launcher has started this process.
    """
    program = os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "PROGRAM"
    return "" if _is_launched() else f"tilework run -n {ranks} {program}"


def _say_alone() -> None:
    """Print a line on stderr, once per process, which says that this process is rank 0 of 1."""
    if os.getpid() not in _said_alone:
        _said_alone.add(os.getpid())
        print(
            f"tilework: no launcher started this process, so it is rank 0 of 1 "
            f"(for more: {starting(2)})",
            file=sys.stderr,
        )


def _check_launched(asked: RankPlace, settings: Settings | None) -> None:
    """Raise ValueError if the caller expects more ranks than the launcher has started."""
    if settings is None or settings.launcher == "RANK" or asked.world_size == UNSET:
        return
    if asked.world_size > settings.world_size:
        raise ValueError(
            f"world_size={asked.world_size} was asked for, but {settings.launcher} has started "
            f"{settings.world_size}; the other ranks would never come: leave out rank and "
            f"world_size, which the launcher gives, or start {asked.world_size} ranks"
        )


def _place(place: RankPlace, settings: Settings | None) -> RankPlace:
    """``place``, with numbers that it lacks taken from the environment or ``settings``."""
    rank, world_size = place.rank, place.world_size
    if rank == UNSET:
        rank = _number("RANK", settings.rank if settings else None)
    if world_size == UNSET:
        world_size = _number("WORLD_SIZE", settings.world_size if settings else None)
    return RankPlace(rank, world_size)


def _number(name: str, detected: int | None) -> int:
    number = integer(os.environ, name)
    if number is None:
        number = detected
    if number is None:
        raise ValueError(_not_set(name))
    if number < 0:
        raise ValueError(f"environment variable {name} cannot be negative, got {number}")
    return number


def _not_set(name: str) -> str:
    return (
        f"env:// needs the environment variable {name} ({_ADVICE[name]}), which is not set. Start "
        "the program with `tilework run`, torchrun, mpirun or srun, or set it for each process."
    )


def _env_store(
    place: RankPlace, settings: Settings | None, timeout: timedelta, secret: bytes | None
) -> Store:
    if _uses_launchers_store():
        return launcher_store(os.environ["TILEWORK_STORE"], timeout, secret)
    if os.environ.get("MASTER_ADDR"):
        host, port = os.environ["MASTER_ADDR"], _master_port()
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return _torchrun_store(host, port, timeout)
        where: Address = TcpAddress(host, port)
    elif settings is not None and settings.job and settings.single_host:
        where = UnixAddress(_job_address(settings.job))
    elif settings is not None and settings.job and settings.host is not None:
        where = TcpAddress(settings.host, _port_for(settings.job))
    else:
        raise ValueError(_not_set("MASTER_ADDR"))
    return _served_store(where, place.rank == 0, timeout, secret)


def _port_for(job: str) -> int:
    return _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS


def _master_port() -> int:
    port = integer(os.environ, "MASTER_PORT")
    if port is None:
        raise ValueError(_not_set("MASTER_PORT"))
    if not 1 <= port <= 65535:
        raise ValueError(f"MASTER_PORT must be between 1 and 65535, got {port}")
    return port


def name_master() -> None:
    """Set MASTER_ADDR and MASTER_PORT where the launcher serves a store and has set neither.

    Nobody listens there, and nobody has to. But a library that finds no MASTER_PORT may take a free
    port in each rank, as Lightning does, and the ranks would never meet.
    """
    text = os.environ.get("TILEWORK_STORE")
    if text and "MASTER_ADDR" not in os.environ and "MASTER_PORT" not in os.environ:
        host = split_url(text).hostname or "127.0.0.1"
        port = str(_port_for(text))
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=port, TILEWORK_MASTER=f"{host}:{port}")


def launcher_serves() -> bool:
    """True if the launcher serves a store, and MASTER_ADDR is only for torch's own groups."""
    master = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return bool(os.environ.get("TILEWORK_STORE")) and os.environ.get("TILEWORK_MASTER") == master


def _uses_launchers_store() -> bool:
    """True if env:// means the store of TILEWORK_STORE."""
    is_set = bool(os.environ.get("TILEWORK_STORE"))
    return is_set and (not os.environ.get("MASTER_ADDR") or launcher_serves())


def outlives_ranks(store: Store) -> bool:
    """True if ``store`` is that of TILEWORK_STORE, which no rank serves."""
    return getattr(store.whole, "url", None) == os.environ.get("TILEWORK_STORE", "")


def launcher_store(text: str, timeout: timedelta, secret: bytes | None) -> Store:
    """Connect to the store at ``text``, which has the form of TILEWORK_STORE, else ValueError."""
    scheme, _, address = text.partition(":")
    if scheme == "unix" and address.startswith(("@", "/")):
        return UnixStore(address, timeout=timeout, secret=secret)
    if text.startswith("tcp://"):
        parts = split_url(text)
        with contextlib.suppress(ValueError):
            if parts.hostname and parts.port:
                return TCPStore(parts.hostname, parts.port, timeout=timeout, secret=secret)
    raise ValueError(
        f"TILEWORK_STORE must be unix:@name or unix:/path, or tcp://host:port, as `tilework run` "
        f"sets it, got {text!r}"
    )


def _secret() -> bytes | None:
    text = os.environ.get("TILEWORK_SECRET")
    if not text:
        return None
    try:
        return bytes.fromhex(text)
    except ValueError:
        # Not shown: it is a secret.
        raise ValueError(
            "TILEWORK_SECRET must be an even number of hexadecimal digits, the same for all ranks "
            "(`python -c 'import secrets; print(secrets.token_hex(32))'` makes one)"
        ) from None


def _job_address(job: str) -> str:
    """A Unix socket's address made from the job's name: the same on all ranks of ``job``."""
    name = f"tilework-{os.geteuid()}-{hashlib.sha256(job.encode()).hexdigest()[:24]}"
    return f"@{name}" if sys.platform == "linux" else f"{tempfile.gettempdir()}/{name}"


def _served_store(where: Address, serve: bool, timeout: timedelta, secret: bytes | None) -> Store:
    """The store at ``where``, which this process serves from now on if ``serve``."""
    key = os.getpid(), where, secret
    if serve and key not in _held:
        server = StoreServer(where, secret)
        server.start()
        _held[key] = server
    if isinstance(where, TcpAddress):
        return TCPStore(where.host, where.port, timeout=timeout, secret=secret)
    return UnixStore(where.name, timeout=timeout, secret=secret)


def _torchrun_store(host: str, port: int, timeout: timedelta) -> Store:
    """Connect to the store that torchrun serves at MASTER_PORT, which speaks torch's protocol."""
    from tilework.store.torch_bridge import TorchStoreAdapter, connect_to_torch

    try:
        store = connect_to_torch(host, port, timeout)
    except DistNetworkError as error:
        raise DistNetworkError(
            f"could not connect to torchrun's store at {host}:{port} within "
            f"{timeout.total_seconds():g} s ({error}). Check that torchrun is still running."
        ) from error
    # torchrun keeps the store over restarts of the ranks: keys of before must not count.
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"tilework/{run}/{attempt}", TorchStoreAdapter(store, timeout))


#: ``handler(url, timeout=…, **kwargs)`` gives the store, this rank, and the world size. The URL's
#: query holds rank and world_size where they were given.
Handler = Callable[..., Iterator[tuple[Store, int, int]]]

_BUILT_IN: dict[str, Handler] = {
    "env": env_rendezvous,
    "tcp": tcp_rendezvous,
    "file": file_rendezvous,
    "unix": unix_rendezvous,
}
_handlers: dict[str, Handler] = dict(_BUILT_IN)


def register_rendezvous_handler(scheme: str, handler: Handler) -> None:
    """Let ``rendezvous`` serve URLs that begin with ``scheme:``.

    Args:
        scheme: The letters before the colon, in any case.
        handler: Called as ``handler(url, timeout=…, **kwargs)``. It returns an iterator, of which
            ``rendezvous`` takes the first item: (store, rank, world size). If the caller of
            ``rendezvous`` gave a rank and a world size, they are in the URL's query.

    Raises:
        ValueError: The scheme is not a URL's, or has a handler already.

    Example::

        def etcd(url, timeout, **kwargs):
            yield MyStore(url, timeout), my_rank, my_world_size

        register_rendezvous_handler("etcd", etcd)
    """
    if not isinstance(scheme, str):
        raise TypeError(f"scheme must be a str, got {type(scheme).__name__}")
    if not callable(handler):
        raise TypeError(f"handler must be callable, got {type(handler).__name__}")
    name = scheme.lower()
    if not name.isascii() or not name[:1].isalpha() or not name.replace("+", "").isalnum():
        raise ValueError(
            f"scheme must be letters, digits and +, beginning with a letter and without ://, got "
            f"{scheme!r}"
        )
    if name in _handlers:
        raise ValueError(
            f"a rendezvous handler for {name}:// is registered already: choose another scheme"
        )
    _handlers[name] = handler


def rendezvous(
    url: str,
    rank: int = UNSET,
    world_size: int = UNSET,
    timeout: timedelta = DEFAULT_TIMEOUT,
    **kwargs: Any,
) -> Iterator[tuple[Store, int, int]]:
    """Find the other ranks: the iterator's only item is (store, rank, world size).

    Blocks in ``next`` until the store can be used, not until all ranks are there; a
    :func:`~tilework.store.store_based_barrier` on the store does that, and names who is missing.
    The caller owns the store and closes it. URLs:

    - ``env://``: everything from the environment, as `tilework run`, torchrun, mpirun, srun or
      a person set it (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT). Rank 0's process serves until
      it ends, unless the launcher serves. Where nothing is set, this process is rank 0 of 1, and
      says so once on stderr.
    - ``tcp://host:port``: rank 0 serves there until it closes the store.
    - ``unix:@name`` or ``unix:/path``: the same on one host, over a Unix socket.
    - ``file:///path``: a :class:`~tilework.store.FileStore`; a new path for each job.
    - what :func:`register_rendezvous_handler` added.

    Args:
        url: Where to meet. ``?rank=…&world_size=…`` may be part of it.
        rank: This rank; -1 if the URL or the environment says.
        world_size: How many ranks there are; -1 if the URL or the environment says.
        timeout: How long to wait for the store; also the store's own time-out.
        kwargs: For the handler; ``secret=`` (bytes) for env, tcp and unix.

    Raises:
        ValueError: A setting is missing, malformed or contradicts another; TypeError likewise.
        DistNetworkError: Nobody serves the store, or not this job's server.
        DistStoreError: The file cannot be used.

    Example:
        >>> import os
        >>> url = f"unix:@my-job-{os.getpid()}"
        >>> store, rank, ranks = next(rendezvous(url, rank=0, world_size=1))
        >>> rank, ranks
        (0, 1)
        >>> store.close()
    """
    parts = split_url(url)
    handler = _handlers.get(parts.scheme)
    if handler is None:
        known = ", ".join(f"{scheme}://" for scheme in sorted(_handlers))
        raise ValueError(
            f"no rendezvous handler for {parts.scheme}:// in {url!r}; known are {known}. "
            "Add others with register_rendezvous_handler."
        )
    merged = merge(url, RankPlace(rank, world_size))
    if handler in _BUILT_IN.values():
        place_of(merged)  # Complain now, not in next().
    return handler(merged, timeout=positive(timeout), **kwargs)
