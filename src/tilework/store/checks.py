"""Checks and messages that stores share: keys, values, durations, time-outs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from datetime import timedelta
from typing import Final

from tilework.errors import DistStoreError, QueueEmptyError, StoreTimeoutError

#: The longest key, in bytes of UTF-8.
MAX_KEY_BYTES: Final = 64 << 10
#: The longest value, and the longest expected and desired of ``compare_set`` together. A little
#: below the largest message, so that a key and a value always fit into one message.
MAX_VALUE_BYTES: Final = (64 << 20) - (128 << 10)
#: A value at an integer key fits into 64 signed bits, as in every other c10d store.
MAX_INTEGER: Final = (1 << 63) - 1

#: No wait is longer, however large the timeout: poll() counts milliseconds in 32 bits.
LONGEST_WAIT_SECONDS: Final = 20.0 * 24 * 3600

#: The number of keys that an error message spells out.
_KEYS_SHOWN: Final = 8


def key_bytes(key: str) -> bytes:
    """``key`` as UTF-8. Raises TypeError or ValueError if it is not a valid key of a store."""
    if not isinstance(key, str):
        raise TypeError(f"a store's key must be a str, got {type(key).__name__}")
    try:
        data = key.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a store's key must be encodable as UTF-8, got {key!r}") from error
    if len(data) > MAX_KEY_BYTES:
        raise ValueError(
            f"a store's key takes at most {MAX_KEY_BYTES} bytes, got {len(data)}: {key[:40]!r}…"
        )
    return data


def keys_bytes(keys: Sequence[str]) -> list[bytes]:
    """Each of ``keys`` as UTF-8. Raises TypeError for a str, which would mean a key per letter."""
    if isinstance(keys, (str, bytes)):
        raise TypeError(f"expected a sequence of keys, got one {type(keys).__name__}: {keys!r}")
    return list(map(key_bytes, keys))


def data_bytes(value: str | bytes) -> bytes:
    """The bytes of a store's value; a str becomes UTF-8. Raises TypeError, or ValueError if too
    long.
    """
    if isinstance(value, str):
        value = value.encode()
    elif not isinstance(value, bytes):
        raise TypeError(f"a store's value must be str or bytes, got {type(value).__name__}")
    if len(value) > MAX_VALUE_BYTES:
        raise ValueError(f"a store's value takes at most {MAX_VALUE_BYTES} bytes, got {len(value)}")
    return value


def compare_set_bytes(expected: str | bytes, desired: str | bytes) -> tuple[bytes, bytes]:
    """Both arguments of ``compare_set`` as bytes; ValueError if one message cannot hold both."""
    old, new = data_bytes(expected), data_bytes(desired)
    if len(old) + len(new) > MAX_VALUE_BYTES:
        raise ValueError(
            f"expected and desired together take at most {MAX_VALUE_BYTES} bytes, "
            f"got {len(old)} + {len(new)}"
        )
    return old, new


def amount_int(amount: int) -> int:
    """``amount`` itself, or a TypeError if it is no integer, a ValueError beyond 64 signed bits."""
    if not isinstance(amount, int):
        raise TypeError(f"add takes an int, got {type(amount).__name__}")
    if not -MAX_INTEGER - 1 <= amount <= MAX_INTEGER:
        raise ValueError(f"add takes an integer of 64 signed bits, got {amount}")
    return amount


def same_length(keys: Sequence[str], values: Sequence[str | bytes]) -> None:
    """Raise ValueError unless there are as many values as keys."""
    if len(keys) != len(values):
        raise ValueError(
            f"multi_set needs one value per key, got {len(keys)} keys and {len(values)} values"
        )


def positive(timeout: timedelta) -> timedelta:
    """``timeout`` itself, or a TypeError if it is no timedelta, a ValueError if it is not
    positive.
    """
    if not isinstance(timeout, timedelta):
        raise TypeError(
            f"a timeout is a datetime.timedelta, got {type(timeout).__name__} {timeout!r}"
        )
    if timeout <= timedelta(0):
        raise ValueError(f"a store's timeout must be positive, got {timeout}")
    return timeout


def seconds(timeout: timedelta) -> float:
    """``timeout`` in seconds, limited to 20 days; 0 means to look once, without a wait.

    Raises TypeError or ValueError if ``timeout`` is no timedelta, or negative.
    """
    if not isinstance(timeout, timedelta):
        raise TypeError(
            f"a timeout is a datetime.timedelta, got {type(timeout).__name__} {timeout!r}"
        )
    if timeout < timedelta(0):
        raise ValueError(f"a timeout cannot be negative, got {timeout}")
    return min(timeout.total_seconds(), LONGEST_WAIT_SECONDS)


class Deadline:
    """A point in time after which waiting ends."""

    def __init__(self, after_seconds: float) -> None:
        self._end = time.monotonic() + after_seconds

    def left(self) -> float:
        """Seconds that remain, never negative."""
        return max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        """True if no time remains."""
        return time.monotonic() >= self._end


def show_key(key: bytes) -> str:
    """``key`` as text for an error message; bytes that are not UTF-8 are replaced."""
    return repr(key.decode(errors="replace"))


def show_keys(keys: Sequence[str]) -> str:
    """``keys`` for an error message: the first few, and how many more."""
    return f"[{first_few([repr(key) for key in keys], _KEYS_SHOWN)}]"


def first_few(items: Sequence[object], most: int) -> str:
    """``items`` for a message: the first ``most``, and how many more there are."""
    shown = ", ".join(map(str, items[:most]))
    more = len(items) - most
    return shown if more <= 0 else f"{shown}, … and {more} more"


def timeout_error(
    where: str, keys: Sequence[str], missing: Sequence[str], waited_seconds: float
) -> StoreTimeoutError:
    """The error for ``keys`` that did not all come to the store ``where`` in time."""
    some = "" if len(missing) == len(keys) else f" (not set: {show_keys(missing)})"
    noun = "key" if len(keys) == 1 else "keys"
    return StoreTimeoutError(
        f"Timeout: waited {waited_seconds:g} s for {noun} {show_keys(keys)} in {where}{some}. "
        "Check that the ranks that set them are running, and use the same store and prefix.",
        missing=missing,
    )


def empty_error(where: str, key: str) -> QueueEmptyError:
    """The error for a queue without values, where the caller does not wait."""
    return QueueEmptyError(f"queue is empty: {key!r} in {where} has no value now")


def closed_error(where: str) -> DistStoreError:
    """The error for a store that is used after close()."""
    return DistStoreError(f"{where} is closed: make a new store to continue")


# A single request has the time-out of the request and a little more, as the server has other
# clients. Where a task makes one request after the other, a server that has been stopped would use
# up that time with each; so the task says how long all of it may take.

#: Seconds by which an answer, "time is up" say, may be late: the server has other clients.
GRACE_SECONDS: Final = 5.0
#: The same for all requests of a task: a share of the task's time, and these seconds at least.
_GRACE_SHARE, _LEAST_GRACE_SECONDS = 0.5, 1.0
#: Seconds for a request after the task's time is up: the server may well be there.
_LAST_SECONDS: Final = 0.1

#: When the task of this context must have all answers (time.monotonic()).
_end: ContextVar[float | None] = ContextVar("tilework_answer_limit", default=None)


@contextlib.contextmanager
def answers_within(limit: timedelta) -> Iterator[None]:
    """Limit all requests to stores within the block, taken together, to ``limit`` and a bit more.

    Waits for keys end by then, too. In nested blocks the limit that ends first counts.
    """
    whole = seconds(limit)
    grace = min(GRACE_SECONDS, max(_LEAST_GRACE_SECONDS, _GRACE_SHARE * whole))
    end, outer = time.monotonic() + whole + grace, _end.get()
    token = _end.set(end if outer is None else min(end, outer))
    try:
        yield
    finally:
        _end.reset(token)


def left_seconds(seconds: float) -> float:
    """``seconds``, or the time left in the enclosing :func:`answers_within` if that is shorter."""
    end = _end.get()
    return seconds if end is None else min(seconds, max(0.0, end - time.monotonic()))


def answer_seconds(wait_seconds: float) -> float:
    """The seconds to wait for the answer to a request on which the server may wait itself.

    That is ``wait_seconds`` and a bit more, or the time left in :func:`answers_within` if shorter.
    """
    alone = wait_seconds + GRACE_SECONDS
    return min(alone, left_seconds(alone) + _LAST_SECONDS)
