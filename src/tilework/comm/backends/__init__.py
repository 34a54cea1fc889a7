"""Backends that come with the package, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilework.comm.backend import DistributedBackendOptions
from tilework.comm.backends.engines import ENGINES
from tilework.comm.backends.shm import create_shm_group
from tilework.comm.backends.threads import create_threads_group
from tilework.comm.contract import ProcessGroup

BUILT_IN: dict[str, Callable[[DistributedBackendOptions, Any], ProcessGroup]] = {
    "threads": create_threads_group,
    "shm": create_shm_group,
    **ENGINES,
}
