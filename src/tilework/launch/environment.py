"""The environment variables that a rank is started with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tilework import huge_pages
from tilework.comm.launching import (
    MIN_RANKS_VARIABLE,
    REJOIN_VARIABLE,
    TRACE_VARIABLE,
    WATCH_VARIABLE,
)
from tilework.cores import THREAD_VARIABLES, threads_per_rank
from tilework.launch.nodes import NodePlace
from tilework.launch.settings import LaunchSettings
from tilework.rendezvous.internal import ENDS_VARIABLE

#: Variables of another launcher, which a rank must not take for its own.
_FOREIGN: Final = (
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_"),
    *("TILEWORK_STORE", "TILEWORK_MASTER", "TILEWORK_SECRET"),
    *(ENDS_VARIABLE, REJOIN_VARIABLE, MIN_RANKS_VARIABLE),
)


@dataclass(frozen=True)
class Rendezvous:
    """The meeting point of a launch's ranks: a private socket, or a TCP port if asked."""

    secret: str = field(repr=False)
    """The secret of this job's processes in hexadecimal; empty: anybody may connect."""
    store: str | None = None
    """``unix:@name``, ``unix:/path`` or ``tcp://host:port`` of the launcher's store; None: rank 0
    serves at ``master``."""
    master: tuple[str, int] | None = None
    """Host and port for rank 0 to listen on; None without TCP."""
    ends: str | None = None
    """The store for the list of ended ranks, if rank 0 serves; None: the list is in ``store``."""


def rank_environment(
    settings: LaunchSettings,
    rank: int,
    rendezvous: Rendezvous,
    base: Mapping[str, str] | None = None,
    place: NodePlace | None = None,
) -> dict[str, str]:
    """The whole environment of ``rank``: ``base`` (default: this process's) and the rank's
    variables.

    The names are torchrun's, so that scripts written for torchrun work, except that MASTER_ADDR and
    MASTER_PORT exist only where TCP was requested.
    """
    inherited = os.environ if base is None else base
    kept = {name: value for name, value in inherited.items() if not name.startswith(_FOREIGN)}
    place = NodePlace.alone(settings.nprocs) if place is None else place
    size = str(place.world_size)
    own = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank - place.first_rank),
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": str(settings.nprocs),
        "GROUP_RANK": str(place.node),
        "GROUP_WORLD_SIZE": str(place.nodes),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": size,
        "ROLE_NAME": "default",
    }
    if rendezvous.master is not None:
        own["MASTER_ADDR"], own["MASTER_PORT"] = rendezvous.master[0], str(rendezvous.master[1])
        if rendezvous.store is not None:  # tilework's own ranks still meet there
            own["TILEWORK_MASTER"] = f"{rendezvous.master[0]}:{rendezvous.master[1]}"
    timeout = settings.timeout
    asked = {
        "TILEWORK_SECRET": rendezvous.secret,
        "TILEWORK_STORE": rendezvous.store,
        ENDS_VARIABLE: rendezvous.ends,
        "TILEWORK_BACKEND": settings.backend,
        "TILEWORK_TIMEOUT": timeout and f"{timeout.total_seconds():.15g}",
        TRACE_VARIABLE: settings.trace and str(settings.trace.absolute()),
        WATCH_VARIABLE: settings.watch and "1",
        MIN_RANKS_VARIABLE: settings.elastic and str(settings.elastic[0]),
    }
    own |= {name: value for name, value in asked.items() if value}
    return kept | library_environment(settings, inherited) | own


def library_environment(settings: LaunchSettings, base: Mapping[str, str]) -> dict[str, str]:
    """The variables that libraries read when they are loaded: threads, as far as ``base`` does not
    choose them, and huge pages of tensors.
    """
    threads = threads_per_rank(settings.nprocs, base)
    free = () if threads is None else [name for name in THREAD_VARIABLES if name not in base]
    chosen = dict.fromkeys(free, str(threads))
    if settings.huge_pages is not None:
        chosen[huge_pages.VARIABLE] = str(int(settings.huge_pages))
    return chosen
