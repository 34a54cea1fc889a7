from __future__ import annotations

import math
import time
from datetime import timedelta

import pytest

import tilework.distributed as dist
from tilework.comm.elastic.watched_store import WatchedStore
from tilework.errors import StoreTimeoutError
from tilework.store import TCPStore
from tilework.store.checks import GRACE_SECONDS, answer_seconds, answers_within, left_seconds


def test_a_request_alone_has_its_own_time_and_a_grace() -> None:
    assert answer_seconds(0.2) == 0.2 + GRACE_SECONDS


@pytest.fixture
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that stands: no time passes between two lines."""
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)


@pytest.mark.usefixtures("still")
def test_all_requests_of_a_task_have_its_time_together() -> None:
    with answers_within(timedelta(seconds=1)):
        assert 1 < answer_seconds(1.0) < 3
        assert 1 < answer_seconds(0.2) < 3  # a short one is not the first to give up
        assert 1 < left_seconds(60) <= 2  # nor does a wait last longer
        assert left_seconds(0.2) == 0.2
    with answers_within(timedelta(hours=1)):
        assert answer_seconds(0.2) == 0.2 + GRACE_SECONDS
    assert answer_seconds(1.0) == 1.0 + GRACE_SECONDS


def test_when_the_time_is_up_each_further_request_has_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with answers_within(timedelta(0)):
        later = time.monotonic() + 60
        monkeypatch.setattr(time, "monotonic", lambda: later)
        assert left_seconds(60) == 0
        assert 0 < answer_seconds(60) <= 1


@pytest.mark.usefixtures("still")
def test_the_shorter_time_counts() -> None:
    with answers_within(timedelta(seconds=1)), answers_within(timedelta(minutes=1)):
        assert answer_seconds(60) < 3
    with answers_within(timedelta(minutes=1)), answers_within(timedelta(seconds=1)):
        assert answer_seconds(60) < 3


class AskedStore(dist.HashStore):
    """A store that knows how long its requests would have waited for a server's answer."""

    longest = 0.0

    def check(self, keys: list[str]) -> bool:  # type: ignore[override]
        self.longest = max(self.longest, answer_seconds(math.inf))
        return super().check(keys)

    def add(self, key: str, amount: int) -> int:
        self.longest = max(self.longest, answer_seconds(math.inf))
        return super().add(key, amount)


def test_making_groups_is_such_a_task() -> None:
    store = AskedStore()
    limit = timedelta(seconds=20)
    dist.init_process_group("threads", store=store, rank=0, world_size=1, timeout=limit)
    try:
        assert 20 < store.longest < 26
        store.longest = 0.0
        dist.new_group([0])
        assert 20 < store.longest < 26
    finally:
        dist.destroy_process_group()


def test_a_wait_for_a_key_ends_with_its_task() -> None:
    with (
        TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(minutes=5)) as store,
        answers_within(timedelta(0)),
    ):
        for wait in (store.get, WatchedStore("p", store, lambda: None).get):
            with pytest.raises(StoreTimeoutError, match=r"waited 1 s|waited 0"):
                wait("absent")
