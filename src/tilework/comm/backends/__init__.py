"""The built-in backends, each imported when a program first makes a group with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from tilework.comm.backend import Backend, DistributedBackendOptions, torch_has
from tilework.comm.backends.rounding import HybridOptions
from tilework.comm.contract import ProcessGroup

_Create = Callable[[DistributedBackendOptions, Any], ProcessGroup]


def make_backend(name: str, request: DistributedBackendOptions, pg_options: Any) -> ProcessGroup:
    """Make a group on the backend ``name``; return this rank's end. Collective over its ranks."""
    if isinstance(pg_options, HybridOptions) and name not in (Backend.HYBRID, Backend.SHM):
        raise ValueError(f"backend {name!r} does not take {pg_options}, which is for 'hybrid'")
    plugin = Backend.plugins.get(name.upper())
    if plugin is None:
        return _built_in(name)(request, pg_options)
    if plugin.extended_api:
        return plugin.creator_fn(request, pg_options)
    return plugin.creator_fn(request.store, request.group_rank, request.group_size, request.timeout)


def load_backend(name: str) -> None:
    """Import a built-in backend's module, if possible, for processes that are forked later."""
    with contextlib.suppress(ImportError, KeyError):
        _built_in(name)


def _built_in(name: str) -> _Create:
    if name == Backend.THREADS:
        from tilework.comm.backends.threads.threads_backend import create_threads_group

        return create_threads_group
    if name == Backend.SHM:
        from tilework.comm.backends.shm.shm_backend import create_shm_group

        return create_shm_group
    if name == Backend.HYBRID:
        from tilework.comm.backends.hybrid.hybrid_backend import create_hybrid_group

        return create_hybrid_group
    if name == Backend.PRETEND:
        from tilework.comm.backends.pretend import create_pretend_group

        return create_pretend_group
    if name == Backend.MPI and not torch_has(name):
        from tilework.comm.backends.mpi import create_mpi_group

        return create_mpi_group
    from tilework.comm.backends.torch.torch_engines import ENGINES

    return ENGINES[name]
