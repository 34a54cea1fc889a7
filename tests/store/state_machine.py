"""Random sequences of operations on a store, compared with a dictionary."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tilework.errors import DistStoreError, StoreTimeoutError
from tilework.store import Store

_KEYS = st.sampled_from(["", "a", "b", "a/b"])
_VALUES = st.binary(max_size=8)
_TEXTS = st.text(max_size=4)
_AMOUNTS = st.integers(-(2**40), 2**40)


def store_machine(  # noqa: C901 (a class, whose rules need the arguments)
    make: Callable[[], Store], values: st.SearchStrategy[Any] = _VALUES | _TEXTS
) -> type[RuleBasedStateMachine]:
    """A hypothesis state machine that compares a store with a dictionary, operation by operation.

    ``make`` gives an empty store each time. Run it with ``run_state_machine_as_test``.
    """

    class StoreMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.store = make()
            self.model: dict[str, bytes] = {}
            self.others = self.store.num_keys()

        @rule(key=_KEYS, value=values)
        def set(self, key: str, value: str | bytes) -> None:
            self.store.set(key, value)
            self.model[key] = _as_bytes(value)

        @rule(key=_KEYS)
        def get(self, key: str) -> None:
            if key in self.model:
                assert self.store.get(key) == self.model[key]
            else:
                with pytest.raises(StoreTimeoutError):
                    self.store.get(key, timedelta(0))

        @rule(key=_KEYS, amount=_AMOUNTS)
        def add(self, key: str, amount: int) -> None:
            try:
                total = int(self.model.get(key, b"0")) + amount
            except ValueError:
                with pytest.raises(DistStoreError):
                    self.store.add(key, amount)
                return
            assert self.store.add(key, amount) == total
            self.model[key] = b"%d" % total

        @rule(key=_KEYS, expected=values, desired=values, right=st.booleans())
        def compare_set(
            self, key: str, expected: str | bytes, desired: str | bytes, right: bool
        ) -> None:
            if right:
                expected = self.model.get(key, b"")
            old = self.model.get(key, b"")
            after = _as_bytes(desired) if old == _as_bytes(expected) else self.model.get(key)
            result = self.store.compare_set(key, expected, desired)
            assert result == (_as_bytes(expected) if after is None else after)
            if after is not None:
                self.model[key] = after

        @rule(key=_KEYS, value=values)
        def append(self, key: str, value: str | bytes) -> None:
            self.store.append(key, value)
            self.model[key] = self.model.get(key, b"") + _as_bytes(value)

        @rule(key=_KEYS)
        def delete(self, key: str) -> None:
            assert self.store.delete_key(key) == (key in self.model)
            self.model.pop(key, None)

        @rule(keys=st.lists(_KEYS, max_size=4))
        def check(self, keys: list[str]) -> None:
            assert self.store.check(keys) == all(key in self.model for key in keys)

        @rule(keys=st.lists(_KEYS, max_size=4), value=values)
        def multi(self, keys: list[str], value: str | bytes) -> None:
            self.store.multi_set(keys, [value] * len(keys))
            self.model |= dict.fromkeys(keys, _as_bytes(value))
            assert self.store.multi_get(keys) == [_as_bytes(value)] * len(keys)

        @rule()
        def count(self) -> None:
            assert self.store.num_keys() == self.others + len(self.model)

        def teardown(self) -> None:
            self.store.close()

    return StoreMachine


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
