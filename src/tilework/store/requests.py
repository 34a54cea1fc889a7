"""The operations of a store, and the server's handlers of requests.

An operation that waits for nothing is a :class:`StoreOperation`, which a store in this process
runs without a request. Other handlers answer, or park the request and answer later.

A malformed request raises GarbageError, which closes the connection. A request that is refused
(add to a value that is no integer) raises DistStoreError, which is sent back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final, Generic, Protocol, TypeVar, cast

from tilework.errors import DistStoreError
from tilework.framed import GarbageError
from tilework.store import wire
from tilework.store.checks import MAX_KEY_BYTES, MAX_VALUE_BYTES
from tilework.store.table import Queues, Table
from tilework.store.wire import Code

T = TypeVar("T")

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
    if fields and max(map(len, fields)) > MAX_KEY_BYTES:
        raise GarbageError("a key that is too long")
    return fields


def _fields(fields: list[bytes], count: int) -> list[bytes]:
    """``fields``, if they are ``count``, a key and values within the size limits."""
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


def _key_and_number(fields: list[bytes]) -> tuple[bytes, int]:
    key, number = _fields(fields, 2)
    return key, wire.decode_number(number)


def _pairs(fields: list[bytes]) -> list[bytes]:
    if len(fields) % 2:
        raise GarbageError("a key without a value")
    _keys(fields[::2])
    if any(len(value) > MAX_VALUE_BYTES for value in fields[1::2]):
        raise GarbageError("a value that is too long")
    return fields


def _none(_: list[bytes]) -> None:
    pass


def _number(fields: list[bytes]) -> int:
    return wire.decode_number(fields[0])


def _flag(fields: list[bytes]) -> bool:
    return _number(fields) != 0


def _multi_set(state: StoreState, *fields: bytes) -> None:
    put, rest = state.table.set, iter(fields)
    for key in rest:
        put(key, next(rest))


@dataclass(frozen=True)
class StoreOperation(Generic[T]):
    """An operation that waits for nothing: a call where the contents are, a request elsewhere.

    ``run`` takes the contents and the arguments, bytes and numbers. ``takes`` reads the arguments
    from a request's fields, or raises GarbageError (an int: as many fields); ``gives`` reads the
    result from an answer's fields.
    """

    code: Code
    run: Callable[..., T]
    takes: int | Callable[[list[bytes]], Sequence[bytes | int]]
    gives: Callable[[list[bytes]], T]

    def handle(self, client: Client, state: StoreState, fields: list[bytes]) -> None:
        """Answer a request."""
        takes = self.takes
        args = _fields(fields, takes) if isinstance(takes, int) else takes(fields)
        client.ok(*_answer(self.run(state, *args)))


def to_fields(values: Iterable[bytes | int]) -> list[bytes]:
    """The fields of a message that hold ``values``."""
    return [wire.encode_number(each) if isinstance(each, int) else each for each in values]


def _answer(result: object) -> list[bytes]:
    if not isinstance(result, list):
        return [] if result is None else to_fields([cast(bytes | int, result)])
    size = sum(map(len, result)) + 4 * len(result)
    if len(result) > wire.MAX_FIELDS or size > wire.MAX_MESSAGE_BYTES:
        raise DistStoreError(
            f"list_keys: the store's {len(result)} keys do not fit into one message; ask for the "
            "keys that you know with check"
        )
    return result


SET = StoreOperation(Code.SET, lambda state, key, value: state.table.set(key, value), 2, _none)
MULTI_SET = StoreOperation(Code.MULTI_SET, _multi_set, _pairs, _none)
ADD: StoreOperation[int] = StoreOperation(
    Code.ADD, lambda state, key, number: state.table.add(key, number), _key_and_number, _number
)
COMPARE_SET: StoreOperation[bytes] = StoreOperation(
    Code.COMPARE_SET,
    lambda state, key, old, new: state.table.compare_set(key, old, new),
    3,
    itemgetter(0),
)
APPEND = StoreOperation(
    Code.APPEND, lambda state, key, value: state.table.append(key, value), 2, _none
)
CHECK = StoreOperation(Code.CHECK, lambda state, *keys: state.table.has(keys), _keys, _flag)
DELETE: StoreOperation[bool] = StoreOperation(
    Code.DELETE, lambda state, key: state.table.delete(key), 1, _flag
)
NUM_KEYS = StoreOperation(Code.NUM_KEYS, lambda state: len(state.table.values), 0, _number)
LIST_KEYS: StoreOperation[list[bytes]] = StoreOperation(
    Code.LIST_KEYS, lambda state: list(state.table.values), 0, list
)
QUEUE_PUSH = StoreOperation(
    Code.QUEUE_PUSH, lambda state, key, value: state.queues.push(key, value), 2, _none
)
QUEUE_LENGTH: StoreOperation[int] = StoreOperation(
    Code.QUEUE_LENGTH, lambda state, key: state.queues.length(key), 1, _number
)


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


_OPERATIONS: Final[Sequence[StoreOperation[Any]]] = (
    *(SET, MULTI_SET, ADD, COMPARE_SET, APPEND, CHECK, DELETE, NUM_KEYS, LIST_KEYS),
    *(QUEUE_PUSH, QUEUE_LENGTH),
)
HANDLERS: Final[dict[int, Callable[[Client, StoreState, list[bytes]], None]]] = {
    **{each.code: each.handle for each in _OPERATIONS},
    Code.GET: _get,
    Code.WAIT: _wait,
    Code.JOIN: _join,
    Code.WAIT_WORKERS: _wait_workers,
    Code.APPEND_ON_DISCONNECT: _append_on_disconnect,
    Code.QUEUE_POP: _queue_pop,
}


class LocalClient:
    """The client of a store in this process.

    The request is handled at once, perhaps without an answer yet, or refused: DistStoreError.
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
