"""A store whose operations are requests: written once for all stores of tilework."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import TypeVar

from tilework.store import checks, requests, wire
from tilework.store.checks import Deadline, left_seconds
from tilework.store.contract import Data, Store
from tilework.store.late_notice import KeyWait
from tilework.store.requests import StoreOperation
from tilework.store.wire import Code, WireMessage

T = TypeVar("T")


class RequestStore(Store):
    """A store that turns each operation into a request, which a subclass has answered."""

    @abstractmethod
    def _send(
        self, code: Code, fields: Sequence[bytes], lines: KeyWait | None = None, left: float = 0.0
    ) -> WireMessage:
        """The answer to a request: OK, TOO_LONG, or a TIMEOUT with the keys that are missing.

        With ``lines``, which report a long wait, an answer may take ``left`` seconds. Raises
        DistStoreError if the request is refused, or the store is closed.
        """

    def set(self, key: str, value: Data) -> None:
        self._do(requests.SET, checks.key_bytes(key), checks.data_bytes(value))

    def multi_set(self, keys: Sequence[str], values: Sequence[Data]) -> None:
        """``set`` for several keys, in as few messages as they fit into."""
        checks.same_length(keys, values)
        fields = [b""] * (2 * len(keys))
        fields[::2], fields[1::2] = checks.keys_bytes(keys), map(checks.data_bytes, values)
        for batch in self._batches(fields, 2):
            self._do(requests.MULTI_SET, *batch)

    def get(self, key: str, timeout: timedelta | None = None) -> bytes:
        return self.multi_get([key], timeout)[0]

    def multi_get(self, keys: Sequence[str], timeout: timedelta | None = None) -> list[bytes]:
        """``get`` for several keys, in as few messages as they fit into, under one timeout."""
        limit = left_seconds(self._wait_seconds(timeout))
        deadline = Deadline(limit)
        values: list[bytes] = []
        for batch in self._batches(checks.keys_bytes(keys)):
            values += self._get_batch(batch, keys, limit, deadline)
        return values

    def add(self, key: str, amount: int) -> int:
        return self._do(requests.ADD, checks.key_bytes(key), checks.amount_int(amount))

    def compare_set(self, key: str, expected: Data, desired: Data) -> bytes:
        old_and_new = checks.compare_set_bytes(expected, desired)
        return self._do(requests.COMPARE_SET, checks.key_bytes(key), *old_and_new)

    def append(self, key: str, value: Data) -> None:
        self._do(requests.APPEND, checks.key_bytes(key), checks.data_bytes(value))

    def check(self, keys: Sequence[str]) -> bool:
        for batch in self._batches(checks.keys_bytes(keys)):
            if not self._do(requests.CHECK, *batch):
                return False
        return True

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all ``keys`` exist at once; of very many keys, one batch after the other."""
        limit = left_seconds(self._wait_seconds(timeout))
        deadline = Deadline(limit)
        for batch in self._batches(checks.keys_bytes(keys)):
            self._ask_waiting(Code.WAIT, batch, keys, limit, deadline)

    def delete_key(self, key: str) -> bool:
        return self._do(requests.DELETE, checks.key_bytes(key))

    def num_keys(self) -> int:
        return self._do(requests.NUM_KEYS)

    def list_keys(self) -> list[str]:
        names = self._do(requests.LIST_KEYS)
        try:
            return list(map(bytes.decode, names))
        except UnicodeDecodeError:  # another client's key
            return [name.decode(errors="replace") for name in names]

    def queue_push(self, key: str, value: Data) -> None:
        self._do(requests.QUEUE_PUSH, checks.key_bytes(key), checks.data_bytes(value))

    def queue_pop(self, key: str, block: bool = True, timeout: timedelta | None = None) -> bytes:
        name, limit = checks.key_bytes(key), left_seconds(self._wait_seconds(timeout))
        if block:
            deadline = Deadline(limit)
            return self._ask_waiting(Code.QUEUE_POP, [name], [key], limit, deadline).fields[0]
        answer = self._send(Code.QUEUE_POP, [wire.encode_number(-1), name])
        if answer.code == Code.TIMEOUT:
            raise checks.empty_error(repr(self), key)
        return answer.fields[0]

    def queue_len(self, key: str) -> int:
        return self._do(requests.QUEUE_LENGTH, checks.key_bytes(key))

    def _get_batch(
        self, batch: list[bytes], keys: Sequence[str], limit: float, deadline: Deadline
    ) -> list[bytes]:
        answer = self._ask_waiting(Code.GET, batch, keys, limit, deadline)
        if answer.code != Code.TOO_LONG:
            return answer.fields
        # Together they exceed a message; alone each one fits.
        return [
            self._ask_waiting(Code.GET, [name], keys, limit, deadline).fields[0] for name in batch
        ]

    def _do(self, operation: StoreOperation[T], *args: bytes | int) -> T:
        """The result of an operation that waits for nothing."""
        return operation.gives(self._send(operation.code, requests.to_fields(args)).fields)

    def _batches(self, fields: list[bytes], together: int = 1) -> list[list[bytes]]:
        """The fields in runs for a request each; as many stay ``together``."""
        starts = range(0, len(fields), together)
        return wire.fit_into_messages([tuple(fields[at : at + together]) for at in starts])

    def _ask_waiting(
        self, code: Code, batch: list[bytes], keys: Sequence[str], limit: float, deadline: Deadline
    ) -> WireMessage:
        """The answer for ``batch``, a part of ``keys``; the error names all keys."""
        left = deadline.left()
        # Rounded up: a server that gives up early would cut the caller's time short.
        milliseconds = wire.encode_number(-int(-left * 1000 // 1))
        answer = self._send(code, [milliseconds, *batch], KeyWait(self, batch), left)
        if answer.code == Code.TIMEOUT:
            missing = [name.decode(errors="replace") for name in answer.fields]
            raise checks.timeout_error(repr(self), keys, missing, limit)
        return answer
