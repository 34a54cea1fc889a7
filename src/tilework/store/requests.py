"""The server's handlers of requests: each answers, or parks the request and answers later.

A malformed request raises GarbageError, which closes the connection. A request that is refused
(add to a value that is no integer) raises DistStoreError, which is sent back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from tilework.errors import DistStoreError
from tilework.framed import GarbageError
from tilework.store import wire
from tilework.store.checks import MAX_KEY_BYTES, MAX_VALUE_BYTES
from tilework.store.table import Queues, Table
from tilework.store.wire import Code

_Send = Callable[[Code, Sequence[bytes]], None]


class Client(Protocol):
    """The connection from which a request came, and by which it is answered."""

    def ok(self, *fields: bytes) -> None: ...
    def send(self, code: Code, fields: Sequence[bytes] = ()) -> None: ...
    def park(
        self, milliseconds: int, expired: Callable[[], None], undo: Callable[[], None]
    ) -> None: ...
    def answer_parked(self, code: Code, fields: Sequence[bytes]) -> None: ...
    def append_on_disconnect(self, record: tuple[bytes, bytes] | None) -> None: ...


class StoreState:
    """The contents of one store: the table, the queues, and the workers that joined."""

    def __init__(self) -> None:
        self.table = Table()
        self.queues = Queues()
        #: Names of the clients that joined as workers.
        self.workers: set[bytes] = set()
        #: Called, once each, when a worker joins.
        self.worker_watchers: dict[Callable[[], None], None] = {}

    @property
    def changes(self) -> int:
        """The number of changes so far of the keys and queues."""
        return self.table.changes + self.queues.changes

    def join(self, worker: bytes) -> None:
        """Add ``worker`` to the workers that joined; a name counts once. Call the watchers."""
        self.workers.add(worker)
        for watcher in list(self.worker_watchers):
            watcher()


def _keys(fields: Sequence[bytes]) -> Sequence[bytes]:
    if any(len(field) > MAX_KEY_BYTES for field in fields):
        raise GarbageError("a key that is too long")
    return fields


def _fields(fields: list[bytes], count: int) -> list[bytes]:
    """``fields``, if they are a key and ``count - 1`` values within the size limits."""
    if len(fields) != count:
        raise GarbageError(f"expected {count} fields, got {len(fields)}")
    _keys(fields[:1])
    if sum(map(len, fields[1:])) > MAX_VALUE_BYTES:
        raise GarbageError("a value that is too long")
    return fields


def _timed_keys(fields: list[bytes]) -> tuple[int, list[bytes]]:
    if not fields:
        raise GarbageError("no time-out")
    _keys(fields[1:])
    return wire.decode_number(fields[0]), fields[1:]


def _set(client: Client, state: StoreState, fields: list[bytes]) -> None:
    key, value = _fields(fields, 2)
    state.table.set(key, value)
    client.ok()


def _add(client: Client, state: StoreState, fields: list[bytes]) -> None:
    key, number = _fields(fields, 2)
    client.ok(wire.encode_number(state.table.add(key, wire.decode_number(number))))


def _compare_set(client: Client, state: StoreState, fields: list[bytes]) -> None:
    key, expected, desired = _fields(fields, 3)
    client.ok(state.table.compare_set(key, expected, desired))


def _append(client: Client, state: StoreState, fields: list[bytes]) -> None:
    key, value = _fields(fields, 2)
    state.table.append(key, value)
    client.ok()


def _check(client: Client, state: StoreState, fields: list[bytes]) -> None:
    client.ok(wire.encode_number(state.table.has(_keys(fields))))


def _delete(client: Client, state: StoreState, fields: list[bytes]) -> None:
    (key,) = _fields(fields, 1)
    client.ok(wire.encode_number(state.table.delete(key)))


def _num_keys(client: Client, state: StoreState, fields: list[bytes]) -> None:
    if fields:
        raise GarbageError("num_keys takes nothing")
    client.ok(wire.encode_number(len(state.table.values)))


def _multi_set(client: Client, state: StoreState, fields: list[bytes]) -> None:
    if len(fields) % 2:
        raise GarbageError("a key without a value")
    pairs = list(zip(_keys(fields[::2]), fields[1::2], strict=True))
    if any(len(value) > MAX_VALUE_BYTES for _, value in pairs):
        raise GarbageError("a value that is too long")
    for key, value in pairs:
        state.table.set(key, value)
    client.ok()


def _get(client: Client, state: StoreState, fields: list[bytes]) -> None:
    milliseconds, keys = _timed_keys(fields)

    def answer(send: _Send) -> None:
        values = [state.table.values[key] for key in keys]
        too_long = sum(map(len, values)) + 4 * len(values) > wire.MAX_MESSAGE_BYTES
        send(*((Code.TOO_LONG, ()) if too_long else (Code.OK, values)))

    _when_present(client, state, (milliseconds, keys), answer)


def _wait(client: Client, state: StoreState, fields: list[bytes]) -> None:
    timed_keys = _timed_keys(fields)
    _when_present(client, state, timed_keys, lambda send: send(Code.OK, ()))


def _when_present(
    client: Client,
    state: StoreState,
    timed_keys: tuple[int, list[bytes]],
    answer: Callable[[_Send], None],
) -> None:
    """Call ``answer`` once all keys exist; send TIMEOUT after the milliseconds given."""
    (milliseconds, keys), table = timed_keys, state.table

    def ready() -> None:
        answer(client.answer_parked)

    waiter = table.park(keys, ready)
    if waiter is None:
        answer(client.send)
        return
    parked = waiter

    def expired() -> None:
        client.send(Code.TIMEOUT, table.missing(keys))

    client.park(milliseconds, expired, lambda: table.unpark(parked))


def _join(client: Client, state: StoreState, fields: list[bytes]) -> None:
    """Count a worker; with a key, append the name there if the connection breaks before close."""
    worker, *key = _fields(fields, 2 if len(fields) == 2 else 1)
    if key:
        client.append_on_disconnect((key[0], worker + b" "))
    state.join(worker)
    client.ok()


def _wait_workers(client: Client, state: StoreState, fields: list[bytes]) -> None:
    if len(fields) != 2:
        raise GarbageError("wait_workers takes a time-out and a number")
    milliseconds, wanted = map(wire.decode_number, fields)
    watchers = state.worker_watchers

    def count() -> tuple[bytes, ...]:
        return (wire.encode_number(len(state.workers)),)

    def look() -> None:
        if len(state.workers) >= wanted:
            client.answer_parked(Code.OK, count())

    if len(state.workers) >= wanted:
        client.ok(*count())
        return
    watchers[look] = None
    client.park(
        milliseconds,
        lambda: client.send(Code.TIMEOUT, count()),
        lambda: watchers.pop(look, None) and None,
    )


def _append_on_disconnect(client: Client, state: StoreState, fields: list[bytes]) -> None:
    """Note a key and value to append on disconnect; no fields revoke this."""
    if not fields:
        client.append_on_disconnect(None)
    else:
        key, value, *greeting = fields
        _fields([key, value], 2)
        if greeting:
            state.table.append(*_fields(greeting, 2))
        client.append_on_disconnect((key, value))
    client.ok()


def _list_keys(client: Client, state: StoreState, fields: list[bytes]) -> None:
    if fields:
        raise GarbageError("list_keys takes nothing")
    keys = list(state.table.values)
    if len(keys) > wire.MAX_FIELDS or sum(map(len, keys)) + 4 * len(keys) > wire.MAX_MESSAGE_BYTES:
        raise DistStoreError(
            f"list_keys: the store's {len(keys)} keys do not fit into one message; ask for the "
            "keys that you know with check"
        )
    client.ok(*keys)


def _queue_push(client: Client, state: StoreState, fields: list[bytes]) -> None:
    key, value = _fields(fields, 2)
    state.queues.push(key, value)
    client.ok()


def _queue_pop(client: Client, state: StoreState, fields: list[bytes]) -> None:
    milliseconds, keys = _timed_keys(fields)
    (key,) = _fields(keys, 1)
    value = state.queues.pop(key)
    if value is not None:
        client.ok(value)
        return
    if milliseconds < 0:
        client.send(Code.TIMEOUT, (key,))
        return

    def take(value: bytes) -> None:
        client.answer_parked(Code.OK, (value,))

    def expired() -> None:
        client.send(Code.TIMEOUT, (key,))

    state.queues.park(key, take)
    client.park(milliseconds, expired, lambda: state.queues.unpark(key, take))


def _queue_length(client: Client, state: StoreState, fields: list[bytes]) -> None:
    (key,) = _fields(fields, 1)
    client.ok(wire.encode_number(state.queues.length(key)))


HANDLERS: Final[dict[int, Callable[[Client, StoreState, list[bytes]], None]]] = {
    Code.SET: _set,
    Code.GET: _get,
    Code.ADD: _add,
    Code.COMPARE_SET: _compare_set,
    Code.APPEND: _append,
    Code.CHECK: _check,
    Code.WAIT: _wait,
    Code.DELETE: _delete,
    Code.NUM_KEYS: _num_keys,
    Code.MULTI_SET: _multi_set,
    Code.JOIN: _join,
    Code.WAIT_WORKERS: _wait_workers,
    Code.APPEND_ON_DISCONNECT: _append_on_disconnect,
    Code.LIST_KEYS: _list_keys,
    Code.QUEUE_PUSH: _queue_push,
    Code.QUEUE_POP: _queue_pop,
    Code.QUEUE_LENGTH: _queue_length,
}


class LocalClient:
    """The client of a store in this process.

    Args:
        state: The contents of the store.
        code, fields: The request, which is handled at once, perhaps without an answer yet.

    Raises:
        DistStoreError: The request is refused.
    """

    def __init__(self, state: StoreState, code: int, fields: Sequence[bytes]) -> None:
        self.answer: wire.WireMessage | None = None
        HANDLERS[code](self, state, list(fields))

    def ok(self, *fields: bytes) -> None:
        self.send(Code.OK, fields)

    def send(self, code: Code, fields: Sequence[bytes] = ()) -> None:
        self.answer = wire.WireMessage(code, list(fields))

    def park(
        self, milliseconds: int, expired: Callable[[], None], undo: Callable[[], None]
    ) -> None:
        self._expired, self._undo = expired, undo
        #: Set with the answer, and when the store closes.
        self.ended = threading.Event()

    def answer_parked(self, code: Code, fields: Sequence[bytes]) -> None:
        self._undo()
        self.send(code, fields)
        self.ended.set()

    def append_on_disconnect(self, record: tuple[bytes, bytes] | None) -> None:
        """Do nothing: the store ends with this process."""

    def end(self) -> wire.WireMessage:
        """The answer; if there is none yet, the wait ends with a TIMEOUT."""
        if self.answer is None:
            self._undo()
            self._expired()
        assert self.answer is not None
        return self.answer
