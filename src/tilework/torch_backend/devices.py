"""torch's own engines, for the devices of a group that tilework does not serve.

For "cpu:tilework,cuda:nccl" torch makes the group by tilework alone, because a group written in
Python stands for all of its devices. Therefore the engines of the other devices are made here, when
they are first needed: only then does torch pass the group's configuration.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist

_c10d: Any = torch._C._distributed_c10d


def _gloo(store: Any, rank: int, size: int, timeout: timedelta, options: Any) -> Any:
    return _c10d.ProcessGroupGloo(store, rank, size, timeout)


def _nccl(store: Any, rank: int, size: int, timeout: timedelta, options: Any) -> Any:
    options = options or _c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return _c10d.ProcessGroupNCCL(store, rank, size, options)


_ENGINES: dict[str, Callable[..., Any]] = {"gloo": _gloo, "nccl": _nccl}


class OtherDevices:
    """The engines for devices other than the CPU: torch's, and groups that ``compared`` makes."""

    def __init__(
        self,
        group: Any,
        store: Any,
        timeout: timedelta,
        options: Any,
        compared: Callable[[str], Any],
    ) -> None:
        self._compared = compared
        #: tilework's own groups, by device type.
        self._ours: dict[str, Any] = {}
        self._store = store
        self._timeout = timeout
        self._options = options
        self._rank, self._size = group.rank(), group.size()
        #: A plain torch group that knows these devices.
        self._plain: Any = _c10d.ProcessGroup(store, self._rank, self._size)
        self._made: set[str] = set()

    def names(self, group: Any) -> dict[str, str]:
        """The engine of each device type but the CPU; empty before torch registers the group."""
        try:
            text = torch_dist.get_backend_config(group)
        except ValueError:
            return {}
        pairs = (pair.split(":") for pair in text.split(",") if ":" in pair)
        return {device: name for device, name in pairs if device != "cpu"}

    def group_for(self, group: Any, device: torch.device) -> Any:
        """A torch group for tensors on ``device``, made once. Refuses devices without engine."""
        kind = device.type
        name = self.names(group).get(kind)
        if name == "tilework":
            if kind not in self._ours:
                self._ours[kind] = self._compared(kind)
            return self._ours[kind]
        if name is None or name not in _ENGINES:
            beside = f", and cannot be combined with {name!r}" if name else ""
            raise ValueError(
                f"backend 'tilework' moves cpu tensors, got one on {device}{beside}; for both, "
                f"use init_process_group('cpu:tilework,{kind}:tilework'), '…:nccl' or '…:gloo'"
            )
        if kind not in self._made:
            self._make(group, kind, name)
        return self._plain

    def _make(self, group: Any, kind: str, name: str) -> None:
        store = _c10d.PrefixStore(f"{kind}/", self._store)
        engine = _ENGINES[name](store, self._rank, self._size, self._timeout, self._options)
        backend_type = getattr(_c10d.ProcessGroup.BackendType, name.upper())
        self._plain._register_backend(torch.device(kind), backend_type, engine)
        self._plain._set_default_backend(backend_type)
        # On the group itself as well: for what torch's C++ code asks of it directly.
        group._register_backend(torch.device(kind), backend_type, engine)
        self._plain._set_group_name(group.group_name)
        self._made.add(kind)

    def shutdown(self) -> None:
        """Shut down the engines that were made."""
        for ours in self._ours.values():
            ours.shutdown()
        if self._made:
            self._plain.shutdown()

    def abort(self) -> None:
        """Abort the engines that were made."""
        for ours in self._ours.values():
            ours.abort()
        if self._made:
            self._plain.abort()
