"""``rendezvous``: from a URL to a store, a rank and a world size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from tilework.rendezvous.handlers import (
    UNSET,
    RankPlace,
    env_rendezvous,
    file_rendezvous,
    merge,
    place_of,
    split_url,
    tcp_rendezvous,
    unix_rendezvous,
)
from tilework.store import DEFAULT_TIMEOUT, Store
from tilework.store.internal import positive

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
