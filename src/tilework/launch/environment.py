"""The environment variables that a rank is started with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tilework.comm.elastic.variables import MIN_RANKS_VARIABLE, REJOIN_VARIABLE
from tilework.cores import THREAD_VARIABLES, threads_per_rank
from tilework.launch.nodes import NodePlace
from tilework.launch.settings import LaunchSettings
from tilework.rendezvous.ended_ranks import ENDS_VARIABLE

#: What another launcher may have left behind; a rank must not take it for its own.
_FOREIGN: Final = (
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_"),
    *(
        "TILEWORK_STORE",
        "TILEWORK_MASTER",
        "TILEWORK_SECRET",
        ENDS_VARIABLE,
        REJOIN_VARIABLE,
        MIN_RANKS_VARIABLE,
    ),
)


@dataclass(frozen=True)
class Rendezvous:
    """The meeting point of a launch's ranks: a private socket, or a TCP port if asked."""

    secret: str = field(repr=False)
    """Hexadecimal; whoever holds it belongs to this job. Empty: anybody does."""
    store: str | None = None
    """``unix:@name``, ``unix:/path`` or ``tcp://host:port`` of the launcher's store; None: rank 0
    serves at ``master``."""
    master: tuple[str, int] | None = None
    """Host and port that rank 0 is to listen on; None without TCP."""
    ends: str | None = None
    """Where the launcher tells who has ended, if rank 0 serves: as ``store``."""


def rank_environment(
    settings: LaunchSettings,
    rank: int,
    rendezvous: Rendezvous,
    base: Mapping[str, str] | None = None,
    place: NodePlace | None = None,
) -> dict[str, str]:
    """All of ``rank``'s environment: ``base`` (default: this process's) and what is its own.

    The names are torchrun's, so scripts written for it find what they look for, except that
    MASTER_ADDR and MASTER_PORT exist only where TCP was asked for.
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
    if rendezvous.secret:
        own["TILEWORK_SECRET"] = rendezvous.secret
    if rendezvous.store is not None:
        own["TILEWORK_STORE"] = rendezvous.store
    if rendezvous.master is not None:
        own["MASTER_ADDR"], own["MASTER_PORT"] = rendezvous.master[0], str(rendezvous.master[1])
        if rendezvous.store is not None:  # tilework's own ranks meet there all the same
            own["TILEWORK_MASTER"] = f"{rendezvous.master[0]}:{rendezvous.master[1]}"
    if rendezvous.ends is not None:
        own[ENDS_VARIABLE] = rendezvous.ends
    if settings.backend is not None:
        own["TILEWORK_BACKEND"] = settings.backend
    if settings.timeout is not None:
        own["TILEWORK_TIMEOUT"] = f"{settings.timeout.total_seconds():.15g}"
    if settings.elastic is not None:
        own[MIN_RANKS_VARIABLE] = str(settings.elastic[0])
    return thread_environment(settings.nprocs, inherited) | kept | own


def thread_environment(ranks: int, base: Mapping[str, str]) -> dict[str, str]:
    """The variables for the threads of one of ``ranks``; empty where the user chose already."""
    threads = threads_per_rank(ranks, base)
    return {} if threads is None else dict.fromkeys(THREAD_VARIABLES, str(threads))
