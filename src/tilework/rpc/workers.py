"""The workers, the settings of init_rpc, and time-outs as callers give them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from tilework.store.internal import first_few

_NAME: Final = re.compile(r"[A-Za-z0-9_:.-]{1,127}")
_NAMES_SHOWN: Final = 16


@dataclass(frozen=True)
class WorkerInfo:
    """A rank that takes part in RPC, as the others know it."""

    name: str
    """The name that the worker gave to init_rpc; unique."""
    id: int


#: A worker, as a call addresses it: by name, rank or WorkerInfo.
To = str | int | WorkerInfo


class Directory:
    """All workers, by rank and by name, which must be different."""

    def __init__(self, names: Sequence[str]) -> None:
        self._workers = tuple(WorkerInfo(name, rank) for rank, name in enumerate(names))
        self._by_name = {worker.name: worker for worker in self._workers}
        if len(self._by_name) < len(names):
            twice = sorted({name for name in names if list(names).count(name) > 1})
            ranks = {name: [r for r, other in enumerate(names) if other == name] for name in twice}
            raise ValueError(
                f"worker names must be unique: "
                f"{', '.join(f'ranks {ranks[name]} are all called {name!r}' for name in twice)}"
            )

    def find(self, to: To) -> WorkerInfo:
        """The worker that ``to`` names, by name, rank or WorkerInfo."""
        if isinstance(to, str):
            worker = self._by_name.get(to)
            if worker is None:
                raise ValueError(f"Invalid worker name {to!r}: the workers are {self._names()}")
            return worker
        if isinstance(to, WorkerInfo):
            if to.id in range(len(self._workers)) and self._workers[to.id] == to:
                return to
            raise ValueError(f"{to!r} is not one of the workers {self._names()}")
        if not isinstance(to, int) or isinstance(to, bool):
            raise TypeError(f"a worker is a name, a rank or a WorkerInfo, got {to!r}")
        if to not in range(len(self._workers)):
            raise ValueError(
                f"Invalid worker rank {to}: there are ranks 0 to {len(self._workers) - 1}"
            )
        return self._workers[to]

    def __iter__(self) -> Iterator[WorkerInfo]:
        return iter(self._workers)

    def __len__(self) -> int:
        return len(self._workers)

    def _names(self) -> str:
        return first_few([repr(worker.name) for worker in self._workers], _NAMES_SHOWN)


def check_name(name: str) -> None:
    """Raise TypeError or ValueError unless ``name`` is valid for a worker."""
    if not isinstance(name, str):
        raise TypeError(f"a worker's name is a str, got {name!r}")
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"a worker's name has 1 to 127 letters, digits, or one of _ : . -, got {name!r}"
        )


#: A time-out that was not given: the one of the options holds.
UNSET_RPC_TIMEOUT: Final = -1.0
DEFAULT_RPC_TIMEOUT_SECONDS: Final = 60.0
DEFAULT_NUM_WORKER_THREADS: Final = 16

#: Seconds, 0 for no limit; or a timedelta.
Timeout = float | timedelta


def timeout_seconds(timeout: Timeout, default: float) -> float:
    """``timeout`` in seconds, infinite for 0; ``default`` for -1, the unset timeout."""
    if isinstance(timeout, timedelta):
        seconds = timeout.total_seconds()
    elif isinstance(timeout, int | float) and not isinstance(timeout, bool):
        seconds = float(timeout)
        if seconds == UNSET_RPC_TIMEOUT:
            return default
    else:
        raise TypeError(f"a timeout must be a number of seconds or a timedelta, got {timeout!r}")
    if not seconds >= 0:
        raise ValueError(f"a timeout must not be negative (0 means no limit), got {timeout!r}")
    return seconds or math.inf


class RpcBackendOptions:
    """The options of init_rpc; also called ``TensorPipeRpcBackendOptions``, for torch's sake.

    Args:
        rpc_timeout: The timeout of init_rpc, and of calls that give no other: seconds, or a
            timedelta; 0 means no limit.
        init_method: The URL at which ranks meet. None: the default group's store if there is a
            default group, else env://.
        num_worker_threads: The number of idle threads that are kept for calls from other ranks.
            More calls than that may run at once: each has a thread.
        device_maps, devices, _transports, _channels: Accepted for torch's sake; without effect.

    Example:
        >>> RpcBackendOptions(rpc_timeout=5).rpc_timeout
        5.0
    """

    def __init__(
        self,
        *,
        rpc_timeout: Timeout = DEFAULT_RPC_TIMEOUT_SECONDS,
        init_method: str | None = None,
        num_worker_threads: int = DEFAULT_NUM_WORKER_THREADS,
        device_maps: Mapping[str, Any] | None = None,
        devices: Sequence[Any] | None = None,
        _transports: Sequence[str] | None = None,
        _channels: Sequence[str] | None = None,
    ) -> None:
        if not isinstance(num_worker_threads, int) or num_worker_threads < 1:
            raise ValueError(f"num_worker_threads must be at least 1, got {num_worker_threads!r}")
        #: Seconds; infinite for no limit.
        self.rpc_timeout = timeout_seconds(rpc_timeout, DEFAULT_RPC_TIMEOUT_SECONDS)
        self.init_method = init_method
        self.num_worker_threads = num_worker_threads
