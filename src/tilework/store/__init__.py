"""Stores: how ranks find each other before they have a group.

:class:`Store` is the contract; ``HashStore`` serves threads, ``FileStore`` the processes of one
host or file system, ``UnixStore`` those of one user on one host, ``TCPStore`` any hosts;
``PrefixStore`` is a view of any of them. :mod:`tilework.store.torch_bridge` joins this world and
torch stores, both ways.
"""

from tilework.store.barrier import store_based_barrier
from tilework.store.checks import MAX_KEY_BYTES, MAX_VALUE_BYTES
from tilework.store.contract import DEFAULT_TIMEOUT, Data, Store
from tilework.store.file import FileStore
from tilework.store.memory import HashStore
from tilework.store.prefix import PrefixStore
from tilework.store.server import StoreServer
from tilework.store.tcp import TCPStore
from tilework.store.unix import UnixStore

__all__ = [
    "DEFAULT_TIMEOUT",
    "MAX_KEY_BYTES",
    "MAX_VALUE_BYTES",
    "Data",
    "FileStore",
    "HashStore",
    "PrefixStore",
    "Store",
    "StoreServer",
    "TCPStore",
    "UnixStore",
    "store_based_barrier",
]
