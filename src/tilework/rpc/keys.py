"""The keys by which the ranks of a job encrypt their connections and recognize each other.

Connections are encrypted and authenticated by CURVE, where each end has a key pair and knows the
other's public key. All key pairs are derived from one secret of the job. Therefore ranks exchange
nothing but a random number, and a stranger in the middle cannot put in another key.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from functools import cached_property

import zmq
from zmq.utils import z85

from tilework.errors import DistBackendError
from tilework.store import Store


class Keys:
    """The key pairs of ``size`` ranks that share ``secret``.

    Example:
        >>> keys = Keys(b"the job's", 2)
        >>> keys.allowed[z85.decode(keys.public(1))]
        1
    """

    def __init__(self, secret: bytes, size: int) -> None:
        self._secret = secret
        self._size = size

    def public(self, rank: int) -> bytes:
        """The public key of ``rank``, in Z85."""
        return bytes(zmq.curve_public(self.private(rank)))

    def private(self, rank: int) -> bytes:
        """The private key of ``rank``, in Z85."""
        return bytes(z85.encode(self._derived(f"rank {rank}")))

    @cached_property
    def allowed(self) -> dict[bytes, int]:
        """The ranks of the job, by public key in binary."""
        return {z85.decode(self.public(rank)): rank for rank in range(self._size)}

    @property
    def proof(self) -> str:
        """A text that is equal on ranks with the same secret, but does not reveal the secret."""
        return self._derived("proof").hex()

    def _derived(self, purpose: str) -> bytes:
        return hmac.new(self._secret, f"tilework rpc {purpose}".encode(), hashlib.sha256).digest()


def agree_on_keys(store: Store, size: int) -> Keys:
    """The keys of all ranks that meet at ``store``. Does not wait for other ranks.

    The keys are derived from a random number in the store, which only the job's ranks can read, and
    from secrets that never travel: the store's own, and TILEWORK_SECRET where it is set.

    Raises:
        DistBackendError: The store does not authenticate ranks: strangers can read it, too.
    """
    if not store.authenticated:
        raise DistBackendError(
            f"RPC runs functions for callers, but {store!r} does not check who connects. Start "
            f"the program with `tilework run`, or set TILEWORK_SECRET to the same random hex "
            f"string on every rank"
        )
    number = store.compare_set("number", "", secrets.token_hex(32))
    settings = os.environ.get("TILEWORK_SECRET", "").encode()
    secret = hmac.new(settings, store.secret or b"", hashlib.sha256).digest()
    return Keys(hmac.new(secret, number, hashlib.sha256).digest(), size)
