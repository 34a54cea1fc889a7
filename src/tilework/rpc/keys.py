"""The keys that the ranks of a job have, and nobody else.

Connections are encrypted and authenticated by CURVE, where each end has a key pair and knows the
other's public key. All pairs follow from one secret of the job's, so that nothing but a
random number needs to be exchanged, and a stranger in the middle can put in no other key.
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
        """The rank of each public key of the job, in binary."""
        return {z85.decode(self.public(rank)): rank for rank in range(self._size)}

    @property
    def proof(self) -> str:
        """Equal on ranks that have the same secret; reveals nothing about it."""
        return self._derived("proof").hex()

    def _derived(self, purpose: str) -> bytes:
        return hmac.new(self._secret, f"tilework rpc {purpose}".encode(), hashlib.sha256).digest()


def agree_on_keys(store: Store, size: int) -> Keys:
    """The keys of all ranks that meet at ``store``. Does not wait for them.

    They follow from a random number in the store, which only the job's ranks can ask for, and
    from what never travels: the store's own secret, and TILEWORK_SECRET where it is set.

    Raises:
        DistBackendError: Strangers can read the store as well.
    """
    if not store.authenticated:
        raise DistBackendError(
            f"RPC runs what callers send, and {store!r} does not prove who takes part. Start "
            f"the program with `tilework run`, or set TILEWORK_SECRET to the same random hex "
            f"string on every rank"
        )
    number = store.compare_set("number", "", secrets.token_hex(32))
    settings = os.environ.get("TILEWORK_SECRET", "").encode()
    secret = hmac.new(settings, store.secret or b"", hashlib.sha256).digest()
    return Keys(hmac.new(secret, number, hashlib.sha256).digest(), size)
