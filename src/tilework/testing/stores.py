"""The contract of stores as tests: a store is complete when it passes.

Example (a test module of a store)::

    from tilework.testing.stores import StoreContract

    class TestMine(StoreContract):
        @contextmanager
        def open_pair(self, folder):
            with MyStore(folder / "x") as first, MyStore(folder / "x") as second:
                yield first, second

Needs pytest.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tilework.errors import DistError, DistStoreError, QueueEmptyError, StoreTimeoutError
from tilework.store import MAX_KEY_BYTES, MAX_VALUE_BYTES, PrefixStore, Store, store_based_barrier
from tilework.store.internal import MAX_INTEGER

T = TypeVar("T")
Pair = tuple[Store, Store]

#: A time-out that is meant to pass, and the longest time for it on a busy machine.
SHORT = timedelta(seconds=0.05)
SHORT_AT_MOST_SECONDS = 2.0
#: A time-out that must not pass.
LONG = timedelta(seconds=120)


#: Invalid values; Any, because a type checker would refuse them.
_WRONG_TYPES: Sequence[Callable[[Any], object]] = (
    lambda store: store.set(1, "v"),
    lambda store: store.set("k", 1),
    lambda store: store.set("k", None),
    lambda store: store.get(b"k"),
    lambda store: store.add("k", 1.5),
    lambda store: store.check("letters"),
    lambda store: store.wait("letters"),
    lambda store: store.multi_get("letters"),
    lambda store: store.compare_set("k", 1, "v"),
    lambda store: store.append("k", 1),
    lambda store: store.delete_key(None),
    lambda store: store.wait(["k"], 1.0),
    lambda store: store.set_timeout(1),
)
_WRONG_VALUES: Sequence[Callable[[Store], object]] = (
    lambda store: store.set("k" * (MAX_KEY_BYTES + 1), "v"),
    lambda store: store.set("k", b"v" * (MAX_VALUE_BYTES + 1)),
    lambda store: store.set("\ud800", "v"),
    lambda store: store.add("k", MAX_INTEGER + 1),
    lambda store: store.wait(["k"], timedelta(seconds=-1)),
    lambda store: store.set_timeout(timedelta(0)),
)


class Background:
    """A call of ``fn`` in a separate thread, which begins at once."""

    def __init__(self, fn: Callable[[], Any]) -> None:
        self._fn = fn
        self._outcome: Any = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def result(self) -> Any:
        """Wait for the call; return the result, or raise the exception of the call."""
        self._thread.join(LONG.total_seconds())
        assert not self._thread.is_alive(), "the call has not come back"
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def _run(self) -> None:
        try:
            self._outcome = self._fn()
        except BaseException as error:
            self._outcome = error


class StoreContract(ABC):
    """Tests that a store must pass: subclass it in a test module and define :meth:`open_pair`."""

    #: Whether values that are not UTF-8 can be compared and appended.
    binary_updates = True
    #: Whether the largest value is tried; it takes a while on a disk.
    large_values = True
    #: Whether the store has queues, and lists only its users' keys.
    queues = True
    #: Keys that the store takes: the empty key, the longest key, and characters beyond ASCII.
    keys: Sequence[str] = ("", "a/b", "é\n ", "k" * MAX_KEY_BYTES)
    #: Whether ``close`` makes the store raise.
    closes = True

    @abstractmethod
    def open_pair(self, folder: Path) -> AbstractContextManager[Pair]:
        """A context manager that opens two handles of one empty store, and closes both on exit.

        A key set through one handle can be read through the other; both may be the same object.
        ``folder`` is an empty directory for the store's files.
        """

    @pytest.fixture
    def pair(self, tmp_path: Path) -> Iterator[Pair]:
        with self.open_pair(tmp_path) as pair:
            for store in pair:
                store.set_timeout(LONG)
            yield pair

    # Values.

    def test_what_one_sets_the_other_gets(self, pair: Pair) -> None:
        pair[0].set("k", b"\x00\xff")
        assert pair[1].get("k") == b"\x00\xff"

    def test_str_is_utf8(self, pair: Pair) -> None:
        pair[0].set("k", "é")
        assert pair[1].get("k") == "é".encode()

    def test_set_replaces(self, pair: Pair) -> None:
        pair[0].set("k", "one")
        pair[1].set("k", "two")
        assert pair[0].get("k") == b"two"
        pair[0].set("k", b"")  # an empty value is a value
        assert pair[1].check(["k"])
        assert pair[1].get("k") == b""

    def test_any_text_is_a_key(self, pair: Pair) -> None:
        for key in self.keys:
            pair[0].set(key, "v")
            assert pair[1].get(key) == b"v"

    def test_the_largest_value(self, pair: Pair) -> None:
        if self.large_values:
            pair[0].set("k", b"v" * MAX_VALUE_BYTES)
            assert len(pair[1].get("k")) == MAX_VALUE_BYTES

    # queues

    def test_a_queue_gives_values_in_their_order_once(self, pair: Pair) -> None:
        self._need_queues()
        pair[0].queue_push("q", "1")
        pair[1].queue_push("q", b"\x00\xff")
        assert pair[1].queue_len("q") == 2
        assert (pair[1].queue_pop("q"), pair[0].queue_pop("q")) == (b"1", b"\x00\xff")
        assert pair[0].queue_len("q") == 0

    def test_an_empty_queue_raises_where_nobody_waits(self, pair: Pair) -> None:
        self._need_queues()
        with pytest.raises(QueueEmptyError, match="queue is empty"):
            pair[0].queue_pop("q", block=False)

    def test_a_pop_waits_for_a_push(self, pair: Pair) -> None:
        self._need_queues()
        waiting = Background(lambda: pair[0].queue_pop("q"))
        pair[1].queue_push("q", "v")
        assert waiting.result() == b"v"

    def test_a_pop_that_gave_up_takes_nothing(self, pair: Pair) -> None:
        self._need_queues()
        with pytest.raises(StoreTimeoutError, match=r"^Timeout.*q'"):
            pair[0].queue_pop("q", timeout=timedelta(milliseconds=20))
        pair[1].queue_push("q", "v")
        assert pair[1].queue_pop("q") == b"v"

    def test_queues_are_no_keys(self, pair: Pair) -> None:
        self._need_queues()
        pair[0].set("k", "value")
        pair[0].queue_push("k", "queued")
        assert pair[1].list_keys() == ["k"]
        assert (pair[1].get("k"), pair[1].queue_pop("k")) == (b"value", b"queued")

    def _need_queues(self) -> None:
        if not self.queues:
            pytest.skip("a store without queues")

    # add

    def test_add_counts_from_zero(self, pair: Pair) -> None:
        assert pair[0].add("n", 5) == 5
        assert pair[1].add("n", -7) == -2
        assert pair[0].get("n") == b"-2"
        assert pair[0].add("m", 0) == 0
        assert pair[1].check(["m"])
        pair[0].set("m", "41")
        assert pair[1].add("m", 1) == 42

    def test_add_to_no_integer_changes_nothing(self, pair: Pair) -> None:
        pair[0].set("k", "text")
        with pytest.raises(DistStoreError, match=r"integer at key 'k'|integer at key '.*/k'"):
            pair[1].add("k", 1)
        assert pair[0].get("k") == b"text"

    def test_add_beyond_64_bits_changes_nothing(self, pair: Pair) -> None:
        pair[0].add("n", MAX_INTEGER)
        with pytest.raises(DistStoreError, match="64"):
            pair[1].add("n", 1)
        assert pair[0].add("n", 0) == MAX_INTEGER

    def test_concurrent_adds_all_count(self, pair: Pair) -> None:
        calls = [Background(lambda s=s: [s.add("n", 1) for _ in range(25)]) for s in pair * 2]  # type: ignore[misc]
        seen = sorted(number for call in calls for number in call.result())
        assert seen == list(range(1, 101))

    # compare_set

    def test_compare_set_replaces_only_what_is_expected(self, pair: Pair) -> None:
        pair[0].set("k", "old")
        assert pair[1].compare_set("k", "old", "new") == b"new"
        assert pair[1].compare_set("k", "old", "newer") == b"new"
        assert pair[0].get("k") == b"new"
        assert pair[0].compare_set("absent", "old", "new") == b"old"
        assert not pair[1].check(["absent"])
        assert pair[0].compare_set("absent", "", "new") == b"new"
        assert pair[1].get("absent") == b"new"

    def test_concurrent_compare_sets_have_one_winner(self, pair: Pair) -> None:
        calls = [
            Background(lambda i=i: pair[i % 2].compare_set("k", "", f"{i}"))  # type: ignore[misc]
            for i in range(6)
        ]
        assert len({call.result() for call in calls}) == 1

    # append

    def test_append_creates_and_extends(self, pair: Pair) -> None:
        pair[0].append("k", "one")
        pair[1].append("k", "two")
        assert pair[0].get("k") == b"onetwo"
        pair[0].append("empty", "")
        assert pair[1].get("empty") == b""

    def test_append_of_any_bytes(self, pair: Pair) -> None:
        if self.binary_updates:
            pair[0].append("k", b"\xff")
            assert pair[1].compare_set("k", b"\xff", b"\xfe") == b"\xfe"

    # Keys.

    def test_check_needs_all(self, pair: Pair) -> None:
        pair[0].set("a", "1")
        assert pair[1].check(["a"])
        assert not pair[1].check(["a", "b"])
        assert pair[1].check([])

    def test_delete_says_whether_it_was_there(self, pair: Pair) -> None:
        pair[0].set("k", "v")
        assert pair[1].delete_key("k")
        assert not pair[0].check(["k"])
        assert not pair[0].delete_key("k")

    def test_num_keys_counts(self, pair: Pair) -> None:
        before = pair[0].num_keys()
        pair[0].multi_set(["a", "b"], ["1", "2"])
        assert pair[1].num_keys() == before + 2
        pair[1].delete_key("a")
        assert pair[0].num_keys() == before + 1

    def test_multi_set_and_multi_get_keep_the_order(self, pair: Pair) -> None:
        pair[0].multi_set(["a", "b", "c"], ["1", b"2", "3"])
        assert pair[1].multi_get(["c", "a", "b"]) == [b"3", b"1", b"2"]
        assert pair[0].multi_get([]) == []

    def test_multi_set_needs_a_value_per_key(self, pair: Pair) -> None:
        with pytest.raises(ValueError, match="2 keys and 1 values"):
            pair[0].multi_set(["a", "b"], ["1"])
        assert not pair[1].check(["a"])

    # Waiting.

    def test_get_waits_for_the_key(self, pair: Pair) -> None:
        call = Background(lambda: pair[0].get("k"))
        time.sleep(0.05)
        pair[1].set("k", "v")
        assert call.result() == b"v"

    def test_wait_needs_all_keys(self, pair: Pair) -> None:
        call = Background(lambda: pair[0].wait(["a", "b"]))
        pair[1].set("b", "1")
        time.sleep(0.05)
        pair[1].set("a", "1")
        assert call.result() is None
        pair[0].wait([])

    def test_whatever_makes_a_key_wakes(self, pair: Pair) -> None:
        changes: dict[str, Callable[[Store, str], object]] = {
            "add": lambda store, key: store.add(key, 1),
            "append": lambda store, key: store.append(key, "1"),
            "compare_set": lambda store, key: store.compare_set(key, "", "1"),
            "multi_set": lambda store, key: store.multi_set(["other", key], ["0", "1"]),
        }
        for key, change in changes.items():
            call = Background(lambda key=key: pair[0].multi_get([key]))  # type: ignore[misc]
            time.sleep(0.02)
            change(pair[1], key)
            assert call.result() == [b"1"], key

    def test_a_waiting_thread_does_not_block_another(self, pair: Pair) -> None:
        call = Background(lambda: pair[0].get("k"))
        time.sleep(0.02)
        pair[0].set("k", "by the same store")
        assert call.result() == b"by the same store"

    def test_every_waiter_is_woken(self, pair: Pair) -> None:
        calls = [Background(lambda i=i: pair[i % 2].get("k")) for i in range(8)]  # type: ignore[misc]
        time.sleep(0.02)
        pair[0].set("k", "v")
        assert [call.result() for call in calls] == [b"v"] * 8

    # Time-outs.

    def test_the_timeout_error_names_keys_and_seconds(self, pair: Pair) -> None:
        pair[0].set("here", "1")
        with pytest.raises(StoreTimeoutError, match=r"^Timeout.*0\.05 s.*absent") as caught:
            pair[0].wait(["here", "absent"], SHORT)
        (missing,) = caught.value.missing
        assert missing.endswith("absent")

    def test_set_timeout_bounds_every_wait(self, pair: Pair) -> None:
        pair[0].set_timeout(SHORT)
        assert pair[0].timeout == SHORT
        for method in ("get", "multi_get", "wait"):
            begun = time.monotonic()
            with pytest.raises(DistStoreError, match=r"^Timeout"):
                getattr(pair[0], method)("absent" if method == "get" else ["absent"])
            assert SHORT.total_seconds() <= time.monotonic() - begun < SHORT_AT_MOST_SECONDS

    def test_a_timeout_of_zero_looks_once(self, pair: Pair) -> None:
        pair[0].set("here", "1")
        pair[0].wait(["here"], timedelta(0))
        with pytest.raises(DistStoreError, match=r"^Timeout"):
            pair[0].wait(["absent"], timedelta(0))

    def test_it_goes_on_after_a_timeout(self, pair: Pair) -> None:
        for wait in (pair[0].get, lambda key, limit: pair[0].wait([key], limit)):
            with pytest.raises(DistStoreError, match=r"^Timeout"):
                wait("k", SHORT)
        pair[0].set("k", "v")
        assert pair[0].get("k") == b"v"

    def test_a_barrier_lets_all_pass(self, pair: Pair) -> None:
        calls = [
            Background(lambda r=r: store_based_barrier(r, pair[r % 2], "g", 4, LONG))  # type: ignore[misc]
            for r in range(4)
        ]
        assert [call.result() for call in calls] == [None] * 4

    def test_a_barrier_names_who_is_missing(self, pair: Pair) -> None:
        other = Background(lambda: store_based_barrier(0, pair[0], "g", 4, SHORT))
        with pytest.raises(DistStoreError, match=r"store based barrier.*missing ranks 1, 3\b"):
            store_based_barrier(2, pair[1], "g", 4, 3 * SHORT)
        with pytest.raises(DistStoreError, match="store based barrier"):
            other.result()

    # Misuse.

    def test_wrong_types_are_refused(self, pair: Pair) -> None:
        for call in _WRONG_TYPES:
            with pytest.raises(TypeError):
                call(pair[0])

    def test_wrong_values_are_refused(self, pair: Pair) -> None:
        before = pair[0].num_keys()
        for call in _WRONG_VALUES:
            with pytest.raises(ValueError):  # noqa: PT011 (each says something else)
                call(pair[0])
        assert pair[1].num_keys() == before

    # Views and the end.

    def test_prefixes_do_not_meet(self, pair: Pair) -> None:
        PrefixStore("a", pair[0]).set("k", "1")
        PrefixStore("b", pair[1]).set("k", "2")
        assert pair[1].multi_get(["a/k", "b/k"]) == [b"1", b"2"]

    def test_close_can_be_repeated_and_the_store_then_raises(self, tmp_path: Path) -> None:
        with self.open_pair(tmp_path) as pair:
            pair[0].close()
            pair[0].close()
            if self.closes:
                with pytest.raises(DistError, match="closed"):
                    pair[0].set("k", "v")
