from __future__ import annotations

import threading
import time

import pytest

from tilework.comm.group_wait import GroupWait
from tilework.comm.rank_watch import RankWatch
from tilework.errors import DistBackendError, DistNetworkError, PeerLostError
from tilework.rendezvous.liveness import thread_identity
from tilework.store import HashStore


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


def test_rank_0_stays_with_the_store_until_those_that_wait_have_heard() -> None:
    store = HashStore()
    watches = [RankWatch(store, rank, 3, thread_identity()) for rank in range(3)]
    waits = [GroupWait("g", rank, range(3), store, watches[rank]) for rank in range(3)]
    waits[0].meanwhile([2])  # who has not come is not waited for
    first = threading.Thread(target=waits[0].part)
    first.start()
    first.join(0.1)
    assert first.is_alive()
    waits[1].part()  # does not wait
    first.join(10)
    assert store.get("heard") == b"0 1 "
