"""Settings of init_rpc, and time-outs as callers give them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

#: A time-out that was not given: the one of the options holds.
UNSET_RPC_TIMEOUT: Final = -1.0
DEFAULT_RPC_TIMEOUT_SECONDS: Final = 60.0
DEFAULT_NUM_WORKER_THREADS: Final = 16

#: Seconds, 0 for no limit; or a timedelta.
Timeout = float | timedelta


def timeout_seconds(timeout: Timeout, default: float) -> float:
    """``timeout`` in seconds, infinite for 0; ``default`` if ``timeout`` is -1, the unset timeout.

    Raises:
        TypeError, ValueError: ``timeout`` is not a time, or is negative.

    Example:
        >>> timeout_seconds(timedelta(minutes=1), 5), timeout_seconds(0, 5), timeout_seconds(-1, 5)
        (60.0, inf, 5)
    """
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
