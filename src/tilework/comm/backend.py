"""Names of backends, the registry of their makers, and the backend of each device."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar, NamedTuple

import torch

from tilework.comm.contract import ProcessGroup
from tilework.store import Store


@dataclass(frozen=True, slots=True)
class DistributedBackendOptions:
    """The arguments for a registered backend's function that makes a group.

    See ``extended_api`` of :meth:`Backend.register_backend`.
    """

    #: An empty store that only this group's ranks use.
    store: Store
    #: This rank's number in the group.
    group_rank: int
    #: The number of ranks in the group.
    group_size: int
    #: The time that an operation may wait for other ranks, unless the call gives a timeout.
    timeout: timedelta
    #: The group's name, equal on all ranks.
    group_id: str
    #: The global ranks of the group, in the order of group ranks.
    global_ranks_in_group: tuple[int, ...]
    #: The device types that the backend is named for; empty: all that it serves.
    devices: tuple[str, ...] = ()


class BackendPlugin(NamedTuple):
    """A backend that was registered with :meth:`Backend.register_backend`."""

    #: The function that makes a group of this backend, on each rank of the group.
    creator_fn: Callable[..., ProcessGroup]
    #: True if creator_fn takes (DistributedBackendOptions, pg_options) instead of
    #: (store, group_rank, group_size, timeout).
    extended_api: bool


class Backend(str):
    """A backend's name in lower case; ``Backend.SHM`` and so on are known names.

    ``Backend("SHM") == "shm"``. Register your own with :meth:`register_backend`.

    Raises:
        ValueError: The name is not a string.

    Example:
        >>> Backend("SHM")
        'shm'
    """

    UNDEFINED: ClassVar[str] = "undefined"
    THREADS: ClassVar[str] = "threads"
    SHM: ClassVar[str] = "shm"
    HYBRID: ClassVar[str] = "hybrid"
    GLOO: ClassVar[str] = "gloo"
    NCCL: ClassVar[str] = "nccl"
    UCC: ClassVar[str] = "ucc"
    MPI: ClassVar[str] = "mpi"
    #: Of ranks that do not run: see :mod:`tilework.plan`.
    PRETEND: ClassVar[str] = "pretend"

    #: Every known name, in the order of registration.
    backend_list: ClassVar[list[str]] = [
        *(UNDEFINED, THREADS, SHM, HYBRID, GLOO, NCCL, UCC, MPI, PRETEND)
    ]
    #: Backends that users registered, by upper-case name.
    plugins: ClassVar[dict[str, BackendPlugin]] = {}
    #: torch's name for ``plugins``.
    _plugins: ClassVar[dict[str, BackendPlugin]] = plugins
    #: The device types that each backend serves.
    backend_capability: ClassVar[dict[str, list[str]]] = {
        THREADS: ["cpu"],
        SHM: ["cpu"],
        HYBRID: ["cpu"],
        GLOO: ["cpu", "cuda"],
        NCCL: ["cuda"],
        UCC: ["cpu", "cuda"],
        MPI: ["cpu", "cuda"],
        PRETEND: ["cpu", "cuda", "meta"],
    }

    def __new__(cls, name: str) -> Backend:
        if not isinstance(name, str):
            raise ValueError(
                f"a backend's name must be a string, got {name!r} of type {type(name).__name__}"
            )
        return super().__new__(cls, name.lower())

    @classmethod
    def register_backend(
        cls,
        name: str,
        func: Callable[..., ProcessGroup],
        extended_api: bool = False,
        devices: str | Sequence[str] | None = None,
    ) -> None:
        """Make ``backend=name`` work, by calling ``func`` for each group on each of its ranks.

        Args:
            name: Letters of either case; also becomes the attribute ``Backend.NAME``.
            func: ``func(store, group_rank, group_size, timeout)`` returning a ProcessGroup, or
                with ``extended_api`` ``func(DistributedBackendOptions, pg_options)``.
            extended_api: See ``func``.
            devices: Device types served; None means cpu and cuda.

        Raises:
            ValueError: Another function is already registered under the name.

        Example:
            >>> Backend.register_backend("echo", lambda store, rank, size, timeout: ...)
            >>> Backend.ECHO
            'echo'
        """
        lower, upper = name.lower(), name.upper()
        plugin = BackendPlugin(func, extended_api)
        known = cls.plugins.get(upper)
        if known == plugin:
            return
        if known is not None or lower in cls.backend_list:
            raise ValueError(
                f"backend {name!r} is registered already; choose another name for {func!r}"
            )
        cls.plugins[upper] = plugin
        cls.backend_list.append(lower)
        served = [devices] if isinstance(devices, str) else list(devices or ("cpu", "cuda"))
        cls.backend_capability[lower] = served
        setattr(cls, upper, lower)


def core_error() -> str | None:
    """The reason why the shared-memory core cannot be used here; None if it can."""
    if importlib.util.find_spec("tilework._core") is not None:
        return None
    if not sys.platform.startswith("linux"):
        return f"the shared-memory core needs Linux, this is {sys.platform}"
    return (
        "the shared-memory core was not built (TILEWORK_NO_CORE was set, or the build failed); "
        "install a C++ compiler (apt install g++) and install tilework again"
    )


def torch_has(name: str) -> bool:
    """True if this torch has the engine ``name`` ("gloo", "nccl", "ucc", "mpi")."""
    import torch.distributed as engines

    return bool(engines.is_available() and getattr(engines, f"is_{name}_available")())


def is_backend_available(backend: str) -> bool:
    """True if groups with this backend can be made in this installation.

    Example:
        >>> is_backend_available("threads")
        True
    """
    name = Backend(backend)
    if name == Backend.THREADS or name.upper() in Backend.plugins:
        return True
    if name == Backend.SHM:
        return core_error() is None
    if name == Backend.HYBRID:
        return core_error() is None and torch_has(Backend.GLOO)
    if name == Backend.MPI and importlib.util.find_spec("mpi4py") is not None:
        return True
    if name in (Backend.GLOO, Backend.NCCL, Backend.UCC, Backend.MPI):
        return torch_has(name)
    return False


def get_default_backend_for_device(device: str | torch.device) -> str:
    """The name of the backend that serves tensors on ``device`` if the program names none.

    Raises:
        ValueError: No backend serves the device here.

    Example:
        >>> get_default_backend_for_device("cpu") == BackendConfig().get_device_backend_map()["cpu"]
        True
    """
    served = _default_map()
    kind = torch.device(device).type
    if kind not in served:
        raise ValueError(
            f"Default backend not registered for device : {device}; here are {', '.join(served)}"
        )
    return served[kind]


def is_gloo_available() -> bool:
    """True if this torch has Gloo.

    Example:
        >>> is_gloo_available() == is_backend_available("gloo")
        True
    """
    return is_backend_available(Backend.GLOO)


def is_nccl_available() -> bool:
    """True if this torch has NCCL.

    Example:
        >>> is_nccl_available() == is_backend_available("nccl")
        True
    """
    return is_backend_available(Backend.NCCL)


def is_ucc_available() -> bool:
    """True if this torch has UCC.

    Example:
        >>> is_ucc_available() == is_backend_available("ucc")
        True
    """
    return is_backend_available(Backend.UCC)


def is_mpi_available() -> bool:
    """True if this torch has MPI, or mpi4py is installed.

    Example:
        >>> is_mpi_available() == is_backend_available("mpi")
        True
    """
    return is_backend_available(Backend.MPI)


def is_xccl_available() -> bool:
    """Always False: tilework has no XCCL backend.

    Example:
        >>> is_xccl_available()
        False
    """
    return False


def is_shm_available() -> bool:
    """True if the shared-memory core is built; ``core_error()`` gives the reason if not.

    Example:
        >>> is_shm_available() == is_backend_available("shm")
        True
    """
    return is_backend_available(Backend.SHM)


class BackendConfig:
    """The backend of each device type.

    Args:
        backend: A name ("shm", "gloo": every device it can serve), or pairs
            "cpu:shm,cuda:nccl". None or "undefined" means shm for cpu where it can be used
            (gloo otherwise) and nccl for cuda where there is a GPU.

    Raises:
        ValueError: An unknown name, a malformed pair, or a device named twice.

    Example:
        >>> str(BackendConfig("cpu:shm,cuda:nccl"))
        'cpu:shm,cuda:nccl'
    """

    def __init__(self, backend: str | None = None) -> None:
        text = Backend(Backend.UNDEFINED if backend is None else backend)
        if text == Backend.UNDEFINED:
            self.device_backend_map = _default_map()
        elif ":" in text or "," in text:
            self.device_backend_map = _parse_pairs(text)
        else:
            self.device_backend_map = dict.fromkeys(_served_by(text, text), text)

    def get_device_backend_map(self) -> dict[str, str]:
        """Backend name by device type."""
        return dict(self.device_backend_map)

    def __str__(self) -> str:
        return ",".join(f"{device}:{name}" for device, name in self.device_backend_map.items())

    def __repr__(self) -> str:
        return f"BackendConfig({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BackendConfig):
            return NotImplemented
        return self.device_backend_map == other.device_backend_map

    def __hash__(self) -> int:
        return hash(str(self))


def _default_map() -> dict[str, str]:
    cpu = Backend.SHM if is_backend_available(Backend.SHM) else Backend.GLOO
    cuda = {"cuda": Backend.NCCL} if torch.cuda.is_available() and is_nccl_available() else {}
    return {"cpu": cpu, **cuda}


def _served_by(name: str, text: str) -> list[str]:
    if name not in Backend.backend_capability:
        known = ", ".join(b for b in Backend.backend_list if b != Backend.UNDEFINED)
        raise ValueError(
            f"unknown backend {name!r} in {text!r}; known are {known}. "
            f"Register your own with Backend.register_backend"
        )
    return Backend.backend_capability[name]


def _parse_pairs(text: str) -> dict[str, str]:
    backends: dict[str, str] = {}
    for pair in text.split(","):
        device, colon, name = pair.partition(":")
        if not (device and colon and name) or ":" in name:
            raise ValueError(
                f"cannot read {pair!r} in backend {text!r}; expected one name, or pairs like "
                f"'cpu:shm,cuda:nccl'"
            )
        if device in backends:
            raise ValueError(f"device {device!r} is named twice in backend {text!r}")
        _served_by(name, text)
        backends[device] = name
    return backends
