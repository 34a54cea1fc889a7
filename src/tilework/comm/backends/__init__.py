"""Backends that come with the package, and the making of groups with any backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilework.comm.backend import Backend, DistributedBackendOptions
from tilework.comm.backends.hybrid import create_hybrid_group
from tilework.comm.backends.shm import create_shm_group
from tilework.comm.backends.threads import create_threads_group
from tilework.comm.backends.torch_engines import ENGINES
from tilework.comm.contract import ProcessGroup

BUILT_IN: dict[str, Callable[[DistributedBackendOptions, Any], ProcessGroup]] = {
    "threads": create_threads_group,
    "shm": create_shm_group,
    "hybrid": create_hybrid_group,
    **ENGINES,
}


def make_backend(name: str, request: DistributedBackendOptions, pg_options: Any) -> ProcessGroup:
    """Make this rank's end of one group with the backend ``name``. Collective over its ranks."""
    plugin = Backend.plugins.get(name.upper())
    if plugin is None:
        return BUILT_IN[name](request, pg_options)
    if plugin.extended_api:
        return plugin.creator_fn(request, pg_options)
    return plugin.creator_fn(request.store, request.group_rank, request.group_size, request.timeout)
