from __future__ import annotations

import math
from datetime import timedelta

import tilework.distributed as dist
from tilework.store.answer_limit import GRACE_SECONDS, answer_seconds, answers_within


def test_a_request_alone_has_its_own_time_and_a_grace() -> None:
    assert answer_seconds(0.2) == 0.2 + GRACE_SECONDS


def test_all_requests_of_a_task_have_its_time_together() -> None:
    with answers_within(timedelta(seconds=1)):
        assert 1 < answer_seconds(1.0) <= 2
        assert 1 < answer_seconds(0.2) <= 2  # a short one is not the first to give up
        assert answer_seconds(3.0, waits=True) > 3  # it waits as it was asked to
    with answers_within(timedelta(hours=1)):
        assert answer_seconds(0.2) == 0.2 + GRACE_SECONDS
    assert answer_seconds(1.0) == 1.0 + GRACE_SECONDS


def test_when_the_time_is_up_each_further_request_has_a_moment() -> None:
    with answers_within(timedelta(0)):
        assert 0 < answer_seconds(60) <= 1


def test_the_shorter_time_counts() -> None:
    with answers_within(timedelta(seconds=1)), answers_within(timedelta(minutes=1)):
        assert answer_seconds(60) <= 2
    with answers_within(timedelta(minutes=1)), answers_within(timedelta(seconds=1)):
        assert answer_seconds(60) <= 2


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
        assert 20 < store.longest <= 25
        store.longest = 0.0
        dist.new_group([0])
        assert 20 < store.longest <= 25
    finally:
        dist.destroy_process_group()
