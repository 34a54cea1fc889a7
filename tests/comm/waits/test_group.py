from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import cast

import pytest

from tilework.comm import groups
from tilework.comm.contract import ProcessGroup
from tilework.comm.making.rank_watch import RankWatch
from tilework.comm.waits.group import GroupWait
from tilework.errors import (
    CollectiveMismatchError,
    DistBackendError,
    DistNetworkError,
    DistStoreError,
    PeerLostError,
    StoreTimeoutError,
)
from tilework.rendezvous.liveness import thread_identity
from tilework.store import HashStore, TCPStore
from tilework.store.barrier import Barrier


def look(wait: GroupWait, missing: list[int] | None = None) -> None:
    """A look that is due."""
    time.sleep(0.35)
    wait.check(missing)


def test_a_failure_of_one_rank_is_heard_by_the_others() -> None:
    store = HashStore()
    waits = [GroupWait("g", rank, (0, 1), store) for rank in range(2)]
    look(waits[0])
    waits[1].fail(OSError("no memory"))
    with pytest.raises(DistBackendError, match="rank 1 says: no memory") as caught:
        look(waits[0])
    assert caught.value.ranks == (1,)
    look(waits[1])  # who failed raises its own


def test_the_class_of_the_error_is_kept() -> None:
    store = HashStore()
    waits = [GroupWait("g", rank, (0, 1, 2), store) for rank in range(2)]
    waits[1].fail(PeerLostError("lost rank 2", ranks=[2]))
    with pytest.raises(PeerLostError) as caught:
        look(waits[0])
    assert caught.value.ranks == (2,)


def test_a_line_is_printed_once_for_all_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TILEWORK_LATE_SECONDS", "0.2")
    store = HashStore()
    waits = [GroupWait("g", rank, (0, 1, 2), store) for rank in range(2)]
    for wait in waits:
        look(wait, [2])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "group 'g' is not made yet: waiting for rank 2, ranks 0, 1 came" in lines[0]


def test_a_lost_store_is_the_loss_of_the_rank_that_served_it() -> None:
    error = DistNetworkError("gone")
    assert GroupWait("g", 1, (0, 1), HashStore()).explain(error) is error
    watch = RankWatch(HashStore(), 1, 2, thread_identity())
    explained = GroupWait("g", 1, (0, 1), HashStore(), watch).explain(error)
    assert isinstance(explained, PeerLostError)
    assert explained.ranks == (0,)


def test_a_lost_store_of_a_rank_whose_groups_were_aborted_is_no_loss() -> None:
    """Rank 0 ended because of what rank 2 found; rank 1, which waits, has yet to hear of it."""
    verdict = CollectiveMismatchError("ranks called different things", ranks=[0, 2])

    class Aborted:
        def why_aborted(self) -> DistBackendError:
            return verdict

    groups = [cast(ProcessGroup, Aborted())]
    wait = GroupWait("g", 1, range(3), HashStore(), groups=groups)
    assert wait.explain(DistNetworkError("gone")) is verdict


def test_rank_0_stays_with_the_store_until_those_that_wait_have_heard() -> None:
    store = HashStore()

    def wait_of(rank: int) -> GroupWait:
        watch = RankWatch(store, rank, 3, thread_identity())
        return GroupWait("g", rank, range(3), store, watch)

    first = wait_of(0)
    first.meanwhile([1, 2])
    second = wait_of(1)  # after that count; rank 2, which has not come, is not waited for
    leaving = threading.Thread(target=first.part)
    leaving.start()
    leaving.join(0.1)
    assert leaving.is_alive()
    second.part()  # does not wait
    leaving.join(120)
    assert store.get("heard") == b"0 1 "


def test_rank_0_stays_for_those_that_came_to_the_barrier_of_a_further_group() -> None:
    store = HashStore()
    watches = [RankWatch(store, rank, 3, thread_identity()) for rank in range(3)]
    wait = GroupWait("g", 0, range(3), store, watches[0])
    wait.groups = [cast("ProcessGroup", object())]
    wait.barrier = Barrier(store, "g", 3)
    wait.barrier.arrive(0)
    assert wait._here() == {0}
    wait.barrier.arrive(2)
    assert wait._here() == {0, 2}


def test_the_first_to_tell_is_believed_though_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 finds rank 2 lost, says so, and ends, after rank 0 has listened for the last time."""
    store = HashStore()

    def short_life() -> None:
        watch = RankWatch(store, 1, 3, thread_identity())
        wait = GroupWait("g", 1, range(3), store, watch)
        wait.fail(PeerLostError("lost rank 2", ranks=[2]))

    thread = threading.Thread(target=short_life)
    thread.start()
    thread.join()
    wait = GroupWait("g", 0, range(3), store, RankWatch(store, 0, 3, thread_identity()))
    monkeypatch.setattr(wait, "_hear", lambda: None)
    with pytest.raises(PeerLostError, match="rank 1 says: lost rank 2") as caught:
        look(wait)
    assert caught.value.ranks == (2,)


def test_a_master_that_gave_up_is_not_taken_for_lost() -> None:
    error = StoreTimeoutError("Timeout: rank 2 did not come")
    with (
        TCPStore("127.0.0.1", 0, 3, is_master=True, wait_for_workers=False) as master,
        TCPStore("127.0.0.1", master.port, 3) as store,
    ):
        watch = RankWatch(store, 1, 3, thread_identity())
        wait = GroupWait("g", 1, range(3), store, watch)
        master._give_up(error, 1)
        with pytest.raises(DistStoreError, match="has given up: Timeout: rank 2 did not come"):
            look(wait)


def test_another_process_of_the_same_rank_is_heard() -> None:
    store = HashStore()
    waits = [GroupWait("g", 1, (0, 1), store) for _ in range(2)]
    waits[0].fail(CollectiveMismatchError("two are rank 1", ranks=[1]))
    with pytest.raises(CollectiveMismatchError, match="rank 1 says: two are rank 1"):
        look(waits[1])
    look(waits[0])


def test_what_ranks_disagree_on_is_told_before_one_ends() -> None:
    wait = GroupWait("g", 0, (0, 1), HashStore())

    def disagree() -> None:
        raise CollectiveMismatchError("two are rank 1", ranks=[1])

    with pytest.raises(CollectiveMismatchError):
        groups._agree(wait, "something", timedelta(seconds=120), disagree)
    with pytest.raises(CollectiveMismatchError, match="rank 0 says: two are rank 1"):
        look(GroupWait("g", 1, (0, 1), wait.store))
