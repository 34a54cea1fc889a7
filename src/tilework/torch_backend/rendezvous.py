"""torch's ``env://`` in processes that a launcher started without ``MASTER_ADDR`` or ``RANK``."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch.distributed.rendezvous import _rendezvous_handlers

from tilework.rendezvous.internal import env_rendezvous, launcher_serves, name_master
from tilework.store import Store
from tilework.store.torch_bridge import as_torch_store

_Meeting = Iterator[tuple[Any, int, int]]
_handlers: dict[str, Any] = _rendezvous_handlers
#: torch keeps the C++ half of a store alone, and needs it whenever a group is made.
_held: list[Store] = []


def install_env_rendezvous() -> None:
    """Let torch's ``env://`` find the ranks as tilework's does, where variables are not set.

    Without RANK it uses mpirun's variables, or raises an error that says how to start the program:
    ``accelerate launch --cpu`` sets MASTER_ADDR alone, and starts a single process.
    """
    name_master()
    theirs = _handlers["env"]
    if getattr(theirs, "__module__", None) == __name__:
        return

    def env(url: str, timeout: timedelta = timedelta(minutes=30), **kwargs: Any) -> _Meeting:
        numbered = "RANK" in os.environ or "rank=" in url
        if os.environ.get("MASTER_ADDR") and numbered and not launcher_serves():
            yield from theirs(url, timeout=timeout, **kwargs)
            return
        store, rank, world_size = next(env_rendezvous(url, timeout))
        _held.append(store)
        yield as_torch_store(store), rank, world_size

    _handlers["env"] = env
