"""A process group about to be made on this rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
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
from tilework.comm.backends.per_device import DispatchGroup
from tilework.comm.contract import ProcessGroup
from tilework.comm.debug import logger
from tilework.comm.elastic.registers import Registers, StoreRegisters, identity_key
from tilework.comm.elastic.watched_store import WatchedStore
from tilework.comm.waits.group import MEANS_ERRORS, GroupWait
from tilework.comm.world import GroupRecord, World
from tilework.errors import (
    DistBackendError,
    DistError,
    DistNetworkError,
    StoreTimeoutError,
    text_of,
)
from tilework.rendezvous.internal import process_identity, thread_identity
from tilework.store import PrefixStore, Store
from tilework.store.internal import answers_within


@dataclass(frozen=True, slots=True)
class Watch:
    """A check for lost ranks and a time limit, for waits while a group is made."""

    #: Called repeatedly while this rank waits for others; an exception ends the wait.
    check: Callable[[], None]
    #: The time to make the group in.
    limit: timedelta


@dataclass(slots=True)
class GroupPlan:
    """The plan of a group that this rank is about to make: name, ranks, store and timeout."""

    #: The state of this rank, in which :meth:`make` registers the group.
    world: World
    store: Store
    #: Global ranks, in the order of group ranks.
    ranks: tuple[int, ...]
    #: The group rank of this rank.
    group_rank: int
    name: str
    #: The limit of each operation of the group, and the longest time to make the group in.
    timeout: timedelta
    #: The description that the program gave to the group; empty if none.
    desc: str = ""
    #: The way to wait for other ranks; None: the check of ``wait``, within ``timeout``.
    watch: Watch | None = None
    #: The wait of the ranks that make the group, if they have met already.
    wait: GroupWait | None = None

    def make(self, config: BackendConfig, pg_options: Any, fall_back: bool) -> ProcessGroup:
        """Make the group and register it in the world. Collective over the group's ranks.

        With ``fall_back``, use ``hybrid`` (or ``gloo``) if the ranks cannot share memory.

        Raises:
            DistError: The group cannot be made. Raised on every rank, whichever rank it failed on.
        """
        me = self.ranks[self.group_rank]
        groups = list(self.world.records)
        wait = self.wait or GroupWait(
            self.name, me, self.ranks, self.store, self.world.watch, groups
        )
        watch = self.watch or Watch(wait.check, self.timeout)
        with answers_within(min(self.timeout, watch.limit)), told_to_all(wait):
            group, config, backend = self._make_on(config, pg_options, fall_back, watch)
        record = GroupRecord(group, self.store, config, backend, self.timeout, pg_options)
        self.world.register(record, self.name, self.ranks, self.desc)
        logger.info("made %r", group)
        return group

    def _make_on(
        self, config: BackendConfig, pg_options: Any, fall_back: bool, watch: Watch
    ) -> tuple[ProcessGroup, BackendConfig, str]:
        """Make the group; return it, the config used, and the CPU backend's name."""
        try:
            group = self._make(config, pg_options, watch)
        except Exception as error:
            if not (fall_back and getattr(error, "elsewhere", False)):
                raise
            instead = "hybrid" if is_backend_available("hybrid") else "gloo"
            logger.info("ranks do not share one host, using %s: %s", instead, error)
            config = BackendConfig(str(config).replace("cpu:shm", f"cpu:{instead}"))
            group = self._make(config, pg_options, watch)
        backends = config.get_device_backend_map()
        backend = backends.get("cpu", next(iter(backends.values())))
        try:
            group.registers = self.introduce(BackendConfig(backend), group.registers)
        except BaseException:
            group.close()
            raise
        return group, config, backend

    def introduce(self, config: BackendConfig, registers: Registers | None = None) -> Registers:
        """Write this rank's identity into the registers, for others to see whether it ended."""
        registers = registers or StoreRegisters(PrefixStore(f"{self.name}/registers", self.store))
        registers.write(identity_key(self.group_rank), identity_on(config))
        return registers

    def _make(self, config: BackendConfig, pg_options: Any, watch: Watch) -> ProcessGroup:
        by_device = config.get_device_backend_map()
        devices: dict[str, list[str]] = {}
        for device, name in by_device.items():
            devices.setdefault(name, []).append(device)
        by_name = {
            name: self._end(name, named, pg_options, watch) for name, named in devices.items()
        }
        if len(by_name) == 1:
            return next(iter(by_name.values()))
        return DispatchGroup({device: by_name[name] for device, name in by_device.items()})

    def _end(self, name: str, devices: list[str], pg_options: Any, watch: Watch) -> ProcessGroup:
        request = DistributedBackendOptions(
            PrefixStore(name, self.store),
            self.group_rank,
            len(self.ranks),
            self.timeout,
            self.name,
            self.ranks,
            tuple(devices),
        )
        limit = min(self.timeout, watch.limit)
        watched = WatchedStore(name, self.store, watch.check)
        watched.set_timeout(limit)
        group = make_backend(name, replace(request, store=watched, timeout=limit), pg_options)
        # torch's engines keep their first timeout
        if limit != self.timeout and isinstance(group, NativeGroup):
            group.set_timeout(self.timeout)
        return group


def identity_on(config: BackendConfig) -> str:
    """This rank's thread (on ``threads``) or process, as a text that shows whether it ended."""
    threads = Backend.THREADS in config.get_device_backend_map().values()
    return thread_identity() if threads else process_identity()


@contextlib.contextmanager
def told_to_all(wait: GroupWait) -> Iterator[None]:
    """If the block raises, report the failure to all ranks that make the group.

    Raises:
        DistError: In the place of an OSError, MemoryError or RuntimeError of the block.
    """
    try:
        yield
    except DistNetworkError as error:
        raise wait.explain(error) from error
    except StoreTimeoutError:  # the server does not answer: other ranks cannot be informed
        raise
    except DistError as error:
        wait.fail(error)
        wait.part()
        raise
    except MEANS_ERRORS as error:
        raise wait.without_means(error) from error
    except BaseException as error:
        reason = f"rank {wait.me} raised {type(error).__name__}: {text_of(error)}"
        wait.fail(DistBackendError(reason, ranks=[wait.me]))
        raise
