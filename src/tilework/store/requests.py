"""What the server does for each request. A handler answers, or parks the request and answers later.

A request that breaks its own format raises GarbageError, which closes its connection; one that
is refused (add to what is no integer) raises DistStoreError, which is sent back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from tilework.store import wire
from tilework.store.checks import MAX_KEY_BYTES, MAX_VALUE_BYTES
from tilework.store.wire import Code, GarbageError

if TYPE_CHECKING:
    from tilework.store.service import Connection, Service

_Send = Callable[[Code, Sequence[bytes]], None]


def _keys(fields: Sequence[bytes]) -> Sequence[bytes]:
    if any(len(field) > MAX_KEY_BYTES for field in fields):
        raise GarbageError("a key that is too long")
    return fields


def _fields(fields: list[bytes], count: int) -> list[bytes]:
    """``fields`` if they are a key and ``count - 1`` others, within their limits."""
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


def _set(connection: Connection, service: Service, fields: list[bytes]) -> None:
    key, value = _fields(fields, 2)
    service.table.set(key, value)
    connection.ok()


def _add(connection: Connection, service: Service, fields: list[bytes]) -> None:
    key, number = _fields(fields, 2)
    connection.ok(wire.encode_number(service.table.add(key, wire.decode_number(number))))


def _compare_set(connection: Connection, service: Service, fields: list[bytes]) -> None:
    key, expected, desired = _fields(fields, 3)
    connection.ok(service.table.compare_set(key, expected, desired))


def _append(connection: Connection, service: Service, fields: list[bytes]) -> None:
    key, value = _fields(fields, 2)
    service.table.append(key, value)
    connection.ok()


def _check(connection: Connection, service: Service, fields: list[bytes]) -> None:
    connection.ok(wire.encode_number(service.table.has(_keys(fields))))


def _delete(connection: Connection, service: Service, fields: list[bytes]) -> None:
    (key,) = _fields(fields, 1)
    connection.ok(wire.encode_number(service.table.delete(key)))


def _num_keys(connection: Connection, service: Service, fields: list[bytes]) -> None:
    if fields:
        raise GarbageError("num_keys takes nothing")
    connection.ok(wire.encode_number(len(service.table.values)))


def _multi_set(connection: Connection, service: Service, fields: list[bytes]) -> None:
    if len(fields) % 2:
        raise GarbageError("a key without a value")
    pairs = list(zip(_keys(fields[::2]), fields[1::2], strict=True))
    if any(len(value) > MAX_VALUE_BYTES for _, value in pairs):
        raise GarbageError("a value that is too long")
    for key, value in pairs:
        service.table.set(key, value)
    connection.ok()


def _get(connection: Connection, service: Service, fields: list[bytes]) -> None:
    milliseconds, keys = _timed_keys(fields)

    def answer(send: _Send) -> None:
        values = [service.table.values[key] for key in keys]
        too_long = sum(map(len, values)) + 4 * len(values) > wire.MAX_MESSAGE_BYTES
        send(*((Code.TOO_LONG, ()) if too_long else (Code.OK, values)))

    _when_present(connection, service, (milliseconds, keys), answer)


def _wait(connection: Connection, service: Service, fields: list[bytes]) -> None:
    timed_keys = _timed_keys(fields)
    _when_present(connection, service, timed_keys, lambda send: send(Code.OK, ()))


def _when_present(
    connection: Connection,
    service: Service,
    timed_keys: tuple[int, list[bytes]],
    answer: Callable[[_Send], None],
) -> None:
    """Call ``answer`` now if all keys exist, else park until they do or the time is up."""
    (milliseconds, keys), table = timed_keys, service.table

    def ready() -> None:
        answer(connection.answer_parked)

    waiter = table.park(keys, ready)
    if waiter is None:
        answer(connection.send)
        return
    parked = waiter

    def expired() -> None:
        connection.send(Code.TIMEOUT, table.missing(keys))

    connection.park(milliseconds, expired, lambda: table.unpark(parked))


def _join(connection: Connection, service: Service, fields: list[bytes]) -> None:
    (worker,) = _fields(fields, 1)
    service.join(worker)
    connection.ok()


def _wait_workers(connection: Connection, service: Service, fields: list[bytes]) -> None:
    if len(fields) != 2:
        raise GarbageError("wait_workers takes a time-out and a number")
    milliseconds, wanted = map(wire.decode_number, fields)
    watchers = service.worker_watchers

    def count() -> tuple[bytes, ...]:
        return (wire.encode_number(len(service.workers)),)

    def look() -> None:
        if len(service.workers) >= wanted:
            connection.answer_parked(Code.OK, count())

    if len(service.workers) >= wanted:
        connection.ok(*count())
        return
    watchers[look] = None
    connection.park(
        milliseconds,
        lambda: connection.send(Code.TIMEOUT, count()),
        lambda: watchers.pop(look, None) and None,
    )


HANDLERS: Final[dict[int, Callable[[Connection, Service, list[bytes]], None]]] = {
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
}
