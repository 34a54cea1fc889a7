"""The store of a group's successor: the old store, or a new store if that was lost."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from tilework.comm.elastic.registers import Registers
from tilework.errors import DistBackendError, DistError
from tilework.store import Store, UnixStore

#: Remarks on a decision: use the old store, or the first member serves a new store.
OLD_STORE: Final = "store"
NEW_STORE: Final = "server"
#: Seconds within which a live store answers.
_ANSWER_SECONDS = 1.0
_PAUSE_SECONDS = 0.005


def answers_soon(store: Store) -> bool:
    """True if the store's server answers within a second; False if its process has ended or was
    stopped.
    """
    answered = threading.Event()

    def ask() -> None:
        try:
            store.check(["tilework/answers"])
        except DistError:
            return
        answered.set()

    thread = threading.Thread(target=ask, name="tilework-ask-store", daemon=True)
    thread.start()
    thread.join(_ANSWER_SECONDS)
    return answered.is_set()


def serve_store(registers: Registers, key: str, timeout: timedelta) -> UnixStore:
    """Serve a new store from this process, and write the address to register ``key``, where the
    other ranks read it. Local.
    """
    secret, name = secrets.token_bytes(32), f"@tilework-{secrets.token_hex(16)}"
    store = UnixStore(name, is_master=True, timeout=timeout, secret=secret)
    registers.write(key, f"{name} {secret.hex()}")
    return store


def find_served_store(
    registers: Registers, key: str, timeout: timedelta, limit: float, check: Callable[[], None]
) -> UnixStore:
    """Connect to the store whose address another rank writes to register ``key``; wait for the
    address up to ``limit`` seconds, or until ``check`` raises.
    """
    deadline = time.monotonic() + limit
    while (text := registers.read(key)) is None:
        check()
        if time.monotonic() > deadline:
            raise DistBackendError(
                f"no rank announced the address of a new store within {limit:g} s"
            )
        time.sleep(_PAUSE_SECONDS)
    name, secret = text.split(" ")
    return UnixStore(name, timeout=timeout, secret=bytes.fromhex(secret))
