from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.faults.forked_ranks import ForkedRanks, Say
from tilework.comm.making.rank_watch import RankWatch
from tilework.rendezvous.liveness import process_identity, thread_identity
from tilework.store import FileStore, HashStore, PrefixStore, StoreServer, UnixStore


def test_ranks_that_live_are_not_lost() -> None:
    store = HashStore()
    watches = [RankWatch(store, rank, 2, thread_identity()) for rank in range(2)]
    assert [watch.lost() for watch in watches] == [set(), set()]


def test_a_rank_that_ended_is_lost_to_those_who_can_ask_the_system(tmp_path: Path) -> None:
    def story(rank: int, say: Say) -> None:
        RankWatch(FileStore(tmp_path / "store"), 1, 3, process_identity())

    with ForkedRanks(1, story) as ranks:
        ranks[0].reap()
    store = FileStore(tmp_path / "store")
    assert RankWatch(store, 0, 3, process_identity()).lost() == {1}
    assert RankWatch(store, 2, 3, process_identity()).lost() == {1}


def test_a_will_tells_of_a_rank_of_which_the_system_knows_nothing() -> None:
    with StoreServer.listen_unix(f"@tilework-test-{os.getpid()}") as server:
        server.start()
        address = server.address

        def story(rank: int, say: Say) -> None:
            watch = RankWatch(UnixStore(address), rank, 3, "process elsewhere 1 1")
            if rank == 2:
                watch.close()  # it leaves in order
            say("ready")
            time.sleep(30)

        with ForkedRanks(3, story) as ranks:
            for rank in ranks:
                rank.hear()
            with UnixStore(address) as store:
                watch = RankWatch(store, 0, 3, process_identity())
                for rank in (ranks[1], ranks[2]):
                    rank.kill(signal.SIGKILL)
                    rank.reap()
                deadline = time.monotonic() + 60
                while not watch.lost() and time.monotonic() < deadline:
                    time.sleep(0.01)
                assert watch.lost() == {1}
            ranks[0].kill()


def test_the_roll_is_known_without_the_store() -> None:
    store = HashStore()
    first, second = (RankWatch(store, rank, 2, thread_identity()) for rank in range(2))
    first.learn_all_needed(second.rolls()[0])
    assert not first.ended_here(first.everyone())
    assert not RankWatch(HashStore(), 1, 2, thread_identity()).ended_here([0])


def test_where_ranks_may_be_elsewhere_processes_here_are_not_counted(tmp_path: Path) -> None:
    class Elsewhere(FileStore):
        is_of_one_host = False

    here = RankWatch(FileStore(tmp_path / "here"), 0, 2, process_identity())
    there = RankWatch(PrefixStore("of", Elsewhere(tmp_path / "there")), 0, 2, process_identity())
    assert here._children is not None
    assert there._children is None


def test_ranks_are_told_of_those_that_they_watch() -> None:
    store, size = HashStore(), 80
    watches = [RankWatch(store, rank, size, f"elsewhere {rank}") for rank in range(size)]
    rolls = watches[0].rolls()
    assert max(len(roll.splitlines()) for roll in rolls) == 33
    for rank, watch in enumerate(watches):
        watch.learn_all_needed(rolls[rank // 16])
        assert [*watch._neighbours()] == [(rank + i) % size for i in range(1, 17)]
        assert not watch.server_is_unknown()
        assert watch.lost() == set()
