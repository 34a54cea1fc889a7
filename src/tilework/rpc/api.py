"""The functions of RPC that programs call.

All but init_rpc and is_initialized raise a RuntimeError before init_rpc, and after shutdown.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch

from tilework.comm.per_call.internal import current_pretence
from tilework.errors import PretendError
from tilework.rpc.bootstrap import find_store, join
from tilework.rpc.rref import Request, RRef, current_agent, current_state
from tilework.rpc.workers import UNSET_RPC_TIMEOUT, RpcBackendOptions, Timeout, To, WorkerInfo

T = TypeVar("T")

#: Seconds that the last messages may take to leave, where everybody waited for them.
_LINGER_SECONDS = 2.0


def init_rpc(
    name: str,
    backend: Any = None,
    rank: int = -1,
    world_size: int | None = None,
    rpc_backend_options: RpcBackendOptions | None = None,
) -> None:
    """Start RPC on this rank, as the worker ``name``. Collective; blocks until all ranks have come.

    Ranks meet at the options' ``init_method``; else at the default group's store, if there is a
    default group; else as the environment says (env://). RPC accepts only ranks that share the
    job's secret or a private store.

    Args:
        name: The name by which other workers call this worker; unique.
        backend: Accepted for torch's sake; without effect.
        rank: This worker's rank; -1: as the default group, the URL or the environment says.
        world_size: The number of workers; None: as the default group, the URL or the environment
            says.
        rpc_backend_options: Time-outs and more. ``rpc_timeout`` limits this call too.

    Raises:
        RuntimeError: This rank has called init_rpc already, and not shutdown since.
        ValueError: The name is malformed, two workers have the same name, or a rank or size is
            impossible.
        CollectiveMismatchError: Ranks gave different sizes or the same rank, or have different
            secrets.
        DistBackendError: The job has no secret and no private store by which ranks prove that they
            take part.
        DistStoreError: Some rank did not come in time.
        DistError: Another rank failed in init_rpc, for example because the worker's name is
            malformed.

    Example:
        >>> import operator
        >>> from tilework import rpc
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     rpc.init_rpc(f"worker{rank}")
        ...     total = rpc.rpc_sync("worker1", operator.add, args=(rank, 10))
        ...     rpc.shutdown()
        ...     return total
        >>> run_ranks(2, program)
        [10, 11]
    """
    options = RpcBackendOptions() if rpc_backend_options is None else rpc_backend_options
    if not isinstance(options, RpcBackendOptions):
        raise TypeError(f"rpc_backend_options must be an RpcBackendOptions, got {options!r}")
    if current_pretence() is not None:
        raise PretendError("init_rpc waits for workers, and no other rank runs in a plan")
    state = current_state()
    if state.agent is not None:
        raise RuntimeError("RPC is initialized already: call rpc.shutdown() first")
    store, rank, size, own = find_store(options, rank, world_size)
    state.store = store if own else None
    try:
        join(state, store, rank, size, name, options)
    except BaseException:
        state.close()
        raise


def shutdown(graceful: bool = True, timeout: Timeout = 0) -> None:
    """Leave RPC. Afterwards this rank makes and serves no calls; init_rpc may be called again.

    Args:
        graceful: True: wait until all workers have called this and all calls have ended, also those
            that running functions make meanwhile; collective. False: leave at once, and calls to
            this worker fail with PeerLostError.
        timeout: The longest wait, in seconds or as a timedelta; 0: no limit.

    Raises:
        RpcTimeoutError: The wait took longer than ``timeout``. This rank has left all the same.
        PeerLostError: Another worker died, or left without waiting. This rank has left all the
            same.

    Example: see :func:`init_rpc`.
    """
    agent = current_agent()
    linger = 0.0
    try:
        if graceful:
            agent.finish(timeout)
            linger = _LINGER_SECONDS
    finally:
        current_state().close(linger)


def rpc_sync(
    to: To,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: Timeout = UNSET_RPC_TIMEOUT,
) -> T:
    """Call ``func(*args, **kwargs)`` on worker ``to``, and return the result. Blocks.

    The function travels by name, so all ranks must be able to import it. Arguments and results are
    copied, arguments as they are at the time of the call. Tensors lose the history of their
    gradients.

    Args:
        to: A worker by name, rank, or WorkerInfo; may be this rank.
        func: The function to call; may be marked with ``functions.async_execution``.
        timeout: Seconds or a timedelta; 0: no limit. The default is the options' ``rpc_timeout``.

    Raises:
        Exception: The error of ``func``, with the traceback of the other rank in the message.
        RemoteError: The error of ``func`` cannot be rebuilt on this rank.
        RpcTimeoutError: There was no answer in time. The function may be running still.
        PeerLostError: The worker died or left; noticed within a second.
        TypeError: The function, an argument or the result cannot be pickled.
        ValueError: There is no such worker.

    Example: see :func:`init_rpc`.
    """
    result: T = current_agent().call(Request(to, func, args or (), kwargs or {}, timeout))
    return result


def rpc_async(
    to: To,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: Timeout = UNSET_RPC_TIMEOUT,
) -> torch.futures.Future[T]:
    """As :func:`rpc_sync`, but return a future at once.

    ``wait()`` of the future returns or raises as rpc_sync does. Callbacks run on separate threads
    and may block.

    Example: see docs/how-to/rpc.md.
    """
    return current_agent().call_async(Request(to, func, args or (), kwargs or {}, timeout))


def remote(
    to: To,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: Timeout = UNSET_RPC_TIMEOUT,
) -> RRef[T]:
    """Call ``func`` as :func:`rpc_sync` does, but leave the result on worker ``to``.

    Returns a reference to the result at once. If ``func`` raises, the reference's ``to_here()``
    raises that error.

    Example: see :class:`RRef`.
    """
    rref: RRef[T] = current_agent().remote(Request(to, func, args or (), kwargs or {}, timeout))
    return rref


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """The worker named ``worker_name``; None: this rank's worker.

    Raises:
        ValueError: No worker has the name.
    """
    agent = current_agent()
    return agent.workers.find(agent.rank if worker_name is None else worker_name)


def get_worker_infos() -> list[WorkerInfo]:
    """All workers, in the order of their ranks."""
    return list(current_agent().workers)


def is_initialized() -> bool:
    """True if this rank has called init_rpc, and not shutdown since."""
    return current_state().agent is not None


def get_rpc_timeout() -> float:
    """The default timeout of calls in seconds; infinite for no limit."""
    return current_agent().rpc_timeout


def all_gather(
    obj: T, worker_names: Collection[str] | None = None, timeout: Timeout = UNSET_RPC_TIMEOUT
) -> dict[str, T]:
    """Every worker's ``obj``, by the worker's name. Collective over the workers; blocks.

    The first calls of all workers belong together, and so on. A call that raises RpcTimeoutError
    counts: the object was sent. Let all workers repeat such a call, or none.

    Args:
        worker_names: The workers that take part, including this worker; None: all.
        timeout: Seconds or a timedelta; 0 means no limit.

    Raises:
        ValueError: A name in ``worker_names`` is unknown, or this worker's name is missing there.
        RpcTimeoutError: Some worker did not come in time.
        PeerLostError: Some worker died or left.

    Example: ``rpc.all_gather(rank)`` gives ``{"worker0": 0, "worker1": 1}``.
    """
    agent = current_agent()
    names = [worker.name for worker in agent.workers] if worker_names is None else worker_names
    ranks = tuple(sorted({agent.workers.find(name).id for name in names}))
    if agent.rank not in ranks:
        raise ValueError(
            f"this worker is not among worker_names, which must include it: {sorted(names)}"
        )
    objects = agent.gather("all_gather", ranks, obj, timeout)
    return {agent.workers.find(rank).name: objects[rank] for rank in ranks}


def barrier(
    worker_names: Collection[str] | None = None, timeout: Timeout = UNSET_RPC_TIMEOUT
) -> None:
    """Block until all of ``worker_names`` (None: all workers) have called this. Collective.

    Args and errors are those of :func:`all_gather`.

    Example: see :func:`all_gather`.
    """
    all_gather(None, worker_names, timeout)
