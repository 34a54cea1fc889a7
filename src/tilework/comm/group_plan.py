"""A process group about to be made on this rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from tilework.comm.backend import (
    Backend,
    BackendConfig,
    DistributedBackendOptions,
    is_backend_available,
)
from tilework.comm.backends import make_backend
from tilework.comm.backends.native import NativeGroup
from tilework.comm.contract import ProcessGroup
from tilework.comm.debug import logger
from tilework.comm.dispatch import DispatchGroup
from tilework.comm.elastic.ledger import StoreLedger, identity_key
from tilework.comm.elastic.liveness import process_identity, thread_identity
from tilework.comm.elastic.watched_store import WatchedStore
from tilework.comm.world import GroupRecord, World
from tilework.store import PrefixStore, Store


@dataclass(frozen=True, slots=True)
class Watch:
    """The watch over the ranks that a group is made with."""

    #: Called now and then while this rank waits for others; what it raises ends the wait.
    check: Callable[[], None]
    #: The time to make the group in.
    limit: timedelta


@dataclass(slots=True)
class GroupPlan:
    """A group about to be made on this rank."""

    world: World
    store: Store
    ranks: tuple[int, ...]
    group_rank: int
    name: str
    timeout: timedelta
    desc: str = ""
    watch: Watch | None = None

    def make(self, config: BackendConfig, pg_options: Any, fall_back: bool) -> ProcessGroup:
        """Make and register it; with ``fall_back``, on hybrid where ranks share no memory."""
        try:
            group = self._make(config, pg_options)
        except Exception as error:
            if not (fall_back and getattr(error, "elsewhere", False)):
                raise
            instead = "hybrid" if is_backend_available("hybrid") else "gloo"
            logger.info("ranks do not share one host, using %s: %s", instead, error)
            config = BackendConfig(str(config).replace("cpu:shm", f"cpu:{instead}"))
            group = self._make(config, pg_options)
        backends = config.get_device_backend_map()
        backend = backends.get("cpu", next(iter(backends.values())))
        self._introduce(group, backend)
        record = GroupRecord(group, self.store, config, backend, self.timeout)
        self.world.register(record, self.name, self.ranks, self.desc)
        logger.info("made %r", group)
        return group

    def _introduce(self, group: ProcessGroup, backend: str) -> None:
        """Write this rank's identity into the group's ledger."""
        if group.ledger is None:
            group.ledger = StoreLedger(PrefixStore(f"{self.name}/ledger", self.store))
        identity = thread_identity() if backend == Backend.THREADS else process_identity()
        group.ledger.write(identity_key(self.group_rank), identity)

    def _make(self, config: BackendConfig, pg_options: Any) -> ProcessGroup:
        by_device = config.get_device_backend_map()
        by_name = {name: self._end(name, pg_options) for name in dict.fromkeys(by_device.values())}
        if len(by_name) == 1:
            return next(iter(by_name.values()))
        return DispatchGroup({device: by_name[name] for device, name in by_device.items()})

    def _end(self, name: str, pg_options: Any) -> ProcessGroup:
        request = DistributedBackendOptions(
            PrefixStore(name, self.store),
            self.group_rank,
            len(self.ranks),
            self.timeout,
            self.name,
            self.ranks,
        )
        if self.watch is None:
            return make_backend(name, request, pg_options)
        limit = min(self.timeout, self.watch.limit)
        watched = WatchedStore(name, self.store, self.watch.check)
        watched.set_timeout(limit)
        group = make_backend(name, replace(request, store=watched, timeout=limit), pg_options)
        if isinstance(group, NativeGroup):  # torch's engines keep the time that they began with
            group.set_timeout(self.timeout)
        return group
