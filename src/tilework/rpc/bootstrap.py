"""Starting a rank's agent: the ranks find each other through a store, and agree."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

from tilework.comm.backends.internal import DistributedBackendOptions
from tilework.comm.backends.machine import host_identity, reachable_address
from tilework.comm.world import current_world
from tilework.errors import (
    CollectiveMismatchError,
    DistError,
    DistStoreError,
    StoreTimeoutError,
    text_of,
)
from tilework.memory_files import MemoryFile
from tilework.rendezvous import rendezvous
from tilework.rpc.agent import Agent
from tilework.rpc.rref import RpcState
from tilework.rpc.shared_buffers import SharedBufferPool
from tilework.rpc.transport import Transport, agree_on_keys
from tilework.rpc.workers import Directory, RpcBackendOptions, check_name
from tilework.store import PrefixStore, Store
from tilework.store.internal import first_few

#: Seconds between looks of waiting ranks whether another has failed.
_LOOK_SECONDS = 0.1
#: Seconds that a rank which failed lets the others find out why.
_LEAVING_SECONDS = 1.0
_RANKS_SHOWN = 16


@dataclass(frozen=True)
class Card:
    """A rank's description of itself: name, host and address, which all other ranks read."""

    name: str
    proof: str
    """Equal where the job's secret is."""
    host: str
    """Equal where ranks may reach each other without a network."""
    address: str
    """Where it listens for those."""
    probe: MemoryFile
    """The memory file by which others test whether they can open this rank's files."""


class Meeting:
    """This rank's part in a meeting of ``size`` ranks at ``store``; the block's end is leaving.

    Ranks may meet at the same store again: the store counts how often each rank has come, and how
    often it has left, with success or without.
    """

    def __init__(self, store: Store, rank: int, size: int, seconds: float) -> None:
        self._rank, self._size = rank, size
        self._seconds, self._deadline = seconds, time.monotonic() + seconds
        self._visits = PrefixStore("tilework/rpc", store)
        self._visit = self._visits.add(f"came/{rank}", 1)
        #: Seen by the ranks of this meeting only.
        self.store: Store = PrefixStore(str(self._visit), self._visits)
        if self._visit > 1:  # to whom still waits for the last one, if anybody does
            PrefixStore(str(self._visit - 1), self._visits).set("again", str(rank))

    def __enter__(self) -> Meeting:
        if self._visits.add(f"left/{self._rank}", 0) < self._visit - 1:
            raise self._twice(self._rank)
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        with contextlib.suppress(DistError):  # whoever serves the store may have gone
            if error is not None and not isinstance(error, DistError):  # which all find out alone
                failure = f"rank {self._rank} raised {type(error).__name__}: {text_of(error)}"
                self.store.compare_set("failure", "", failure)
            self._visits.add(f"left/{self._rank}", 1)
            if error is not None:
                self._let_others_leave()

    def _let_others_leave(self) -> None:
        """Wait at most a second for the others, who may read the reason from this rank's store."""
        deadline = time.monotonic() + _LEAVING_SECONDS
        for rank in range(self._size):
            came = self._visits.add(f"came/{rank}", 0) >= self._visit
            while came and self._visits.add(f"left/{rank}", 0) < self._visit:
                if time.monotonic() > deadline:
                    return
                time.sleep(0.01)

    def agree_on_size(self) -> None:
        own = f"rank {self._rank} says world_size={self._size}"
        first = self.store.compare_set("size", "", own).decode()
        if first.partition("=")[2] != str(self._size):
            text = f"ranks disagree on how many workers there are: {own}, but {first}"
            self.store.set("disagreement", text)
            raise CollectiveMismatchError(text)

    def exchange(self, card: Card) -> list[Card]:
        text = json.dumps(asdict(card))
        self.publish("card", text)
        cards = [Card(**json.loads(text)) for text in self.gather("card")]
        cards = [replace(each, probe=MemoryFile(*each.probe)) for each in cards]
        others = [rank for rank, other in enumerate(cards) if other.proof != cards[0].proof]
        if others:
            raise CollectiveMismatchError(
                f"ranks {others} have another secret than rank 0: set TILEWORK_SECRET to the "
                f"same on every rank, or on none",
                ranks=others,
            )
        return cards

    def wait_for_all(self) -> None:
        self.publish("here", "")
        self.gather("here")

    def publish(self, what: str, text: str) -> None:
        self.store.set(f"{what}/{self._rank}", text)

    def gather(self, what: str) -> list[str]:
        keys = [f"{what}/{rank}" for rank in range(self._size)]
        while not self._there(keys):
            if time.monotonic() > self._deadline:
                missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                raise DistStoreError(
                    f"Timed out in init_rpc on rank {self._rank}: ranks "
                    f"[{first_few(missing, _RANKS_SHOWN)}] of {self._size} did not call it within "
                    f"{self._seconds:g} s. Check whether they started, failed, or wait elsewhere"
                )
        return [value.decode() for value in self.store.multi_get(keys)]

    def _there(self, keys: Sequence[str]) -> bool:
        try:
            self.store.wait(keys, timedelta(seconds=_LOOK_SECONDS))
            complete = True
        except StoreTimeoutError:
            complete = False
        if self.store.check(["disagreement"]):
            raise CollectiveMismatchError(self.store.get("disagreement").decode())
        if not complete and self.store.check(["failure"]):
            raise DistError(f"init_rpc failed: {self.store.get('failure').decode()}")
        if not complete and self.store.check(["again"]) and not self.store.check(keys):
            # Nobody comes again before this meeting has ended.
            raise self._twice(int(self.store.get("again")))
        return complete

    def _twice(self, rank: int) -> CollectiveMismatchError:
        return CollectiveMismatchError(
            f"rank {rank} called init_rpc again before all others had called it: two workers say "
            f"that they are rank {rank}, or the first call of rank {rank} failed",
            ranks=[rank],
        )


#: The longest that a rank waits for the others to call init_rpc.
_LONGEST_SECONDS = 7 * 24 * 3600.0


def find_store(
    options: RpcBackendOptions, rank: int, world_size: int | None
) -> tuple[Store, int, int, bool]:
    """The store, this rank, the number of ranks, and True if the caller must close the store."""
    size = -1 if world_size is None else world_size
    world = current_world()
    if options.init_method is None and world.default_group is not None:
        group = world.record(world.default_group)
        rank = group.group.rank() if rank == -1 else rank
        size = group.group.size() if size == -1 else size
        if not 0 <= rank < size:
            raise ValueError(f"rank must be from 0 to world_size - 1, got {rank} of {size}")
        return group.store, rank, size, False
    url = options.init_method or "env://"
    limit = timedelta(seconds=min(options.rpc_timeout, _LONGEST_SECONDS))
    return *next(rendezvous(url, rank, size, timeout=limit)), True


def join(
    state: RpcState, store: Store, rank: int, size: int, name: str, options: RpcBackendOptions
) -> None:
    """Meet all other ranks at ``store``, and set ``state.agent``. Collective; blocks."""
    with contextlib.ExitStack() as undo:
        with Meeting(store, rank, size, min(options.rpc_timeout, _LONGEST_SECONDS)) as meeting:
            check_name(name)
            meeting.agree_on_size()
            if not store.authenticated:
                meeting.wait_for_all()  # so that each learns why there are no keys
            transport = Transport(rank, size, keys := agree_on_keys(meeting.store, size))
            undo.callback(transport.close, 0.0)
            shared_buffers = SharedBufferPool()
            undo.callback(shared_buffers.close)
            ranks, limit = tuple(range(size)), meeting.store.timeout
            host = host_identity(
                DistributedBackendOptions(meeting.store, rank, size, limit, "rpc", ranks)
            )
            card = Card(name, keys.proof, host, transport.listen_here(), shared_buffers.probe)
            cards = meeting.exchange(card)
            workers = Directory([each.name for each in cards])
            addresses = _addresses(meeting, transport, store, cards, host)
        undo.pop_all()
    agent = Agent(
        rank,
        workers,
        transport,
        shared_buffers,
        [card.probe for card in cards],
        options.rpc_timeout,
        options.num_worker_threads,
    )
    state.agent = agent
    agent.start(addresses)


def _addresses(
    meeting: Meeting, transport: Transport, store: Store, cards: list[Card], host: str
) -> list[str]:
    """The address at which this rank reaches each rank, in the order of ranks. Collective."""
    if len({card.host for card in cards}) == 1:
        return [card.address for card in cards]
    meeting.publish("tcp", transport.listen_on(reachable_address(store)))
    far = meeting.gather("tcp")
    return [
        card.address if card.host == host else address
        for card, address in zip(cards, far, strict=True)
    ]
