"""A group with one backend per device type, chosen by the tensors of each call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup, Work
from tilework.comm.flight.ring import Tail
from tilework.comm.forms import Operation
from tilework.errors import DistBackendError


def backend_for(group: ProcessGroup, device_type: str) -> ProcessGroup:
    """The part of ``group`` for tensors of ``device_type``; ``group`` itself if it has none."""
    return group._get_backend(device_type)


class DispatchGroup(ProcessGroup):
    """A group that hands each operation to the backend of the tensors' device type."""

    def __init__(self, by_device: dict[str, ProcessGroup]) -> None:
        self.by_device = by_device
        self.ends = list(dict.fromkeys(by_device.values()))
        self.uneven_sizes = all(end.uneven_sizes for end in self.ends)
        self.holds_copies = any(end.holds_copies for end in self.ends)
        super().__init__(self.ends[0].rank(), self.ends[0].size())
        self.registers = next(
            (end.registers for end in self.ends if end.registers is not None), None
        )
        self._take_fast_path()

    def _take_fast_path(self) -> None:
        if self.by_device.get("cpu") is self.ends[0]:
            self.fast_path = self.ends[0].fast_path  # refuses tensors of other devices

    def departed(self) -> Sequence[int]:
        return sorted({rank for end in self.ends for rank in end.departed()})

    def blocked(self) -> Sequence[tuple[int, int, str]]:
        return [
            (rank, self._numbered(number, end), what)
            for end in self.ends
            for rank, number, what in end.blocked()
        ]

    def waiting(self) -> tuple[int, Sequence[int]] | None:
        for end in self.ends:
            wait = end.waiting()
            if wait is not None:
                return self._numbered(wait[0], end), wait[1]
        return None

    def _numbered(self, number: int, end: ProcessGroup) -> int:
        """The number of an operation of ``end``, different from those of other ends."""
        return number * len(self.ends) + self.ends.index(end)

    def why_aborted(self) -> DistBackendError | None:
        return next((error for end in self.ends if (error := end.why_aborted())), None)

    def abort_for(self, kind: str, ranks: Sequence[int], text: str) -> None:
        for end in self.ends:
            end.abort_for(kind, ranks, text)

    def getBackendName(self) -> str:
        return ",".join(f"{device}:{end.name()}" for device, end in self.by_device.items())

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("group_name", "group_desc", "global_ranks"):
            for end in self.ends:
                setattr(end, name, value)

    def _get_backend(self, device: torch.device | str) -> ProcessGroup:
        return self.by_device.get(torch.device(device).type, self)

    def end_for(self, tensors: Iterable[Any]) -> ProcessGroup:
        """The backend of the first tensor found in (nested) ``tensors``, or a ValueError."""
        device = _device_of(tensors) or next(iter(self.by_device))
        end = self.by_device.get(device)
        if end is None:
            raise ValueError(
                f"group {self.group_name!r} has no backend for {device} tensors, only "
                f"{self.name()!r}; make the group with backend='{self.name()},{device}:…'"
            )
        return end

    def empty(self, *size: int | Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        end = self.by_device.get("cpu")
        return super().empty(*size, dtype=dtype) if end is None else end.empty(*size, dtype=dtype)

    def start(self, operation: Operation) -> Work:
        return self.end_for((operation.inputs, operation.outputs)).start(operation)

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> Work:
        return self.end_for(tensors).send(tensors, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> Work:
        return self.end_for(tensors).recv(tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Work:
        return self.end_for(tensors).recv_anysource(tensors, tag)

    def monitored_barrier(self, timeout: timedelta | None = None) -> None:
        self.ends[0].monitored_barrier(timeout)

    def get_sequence_number_for_group(self) -> int:
        return sum(end.get_sequence_number_for_group() for end in self.ends)

    @property
    def authenticated(self) -> bool:
        return all(end.authenticated for end in self.ends)

    def flight_tails(self) -> list[Tail]:
        return [tail for end in self.ends for tail in end.flight_tails()]

    def cut_tails(self) -> None:
        for end in self.ends:
            end.cut_tails()

    def set_timeout(self, timeout: timedelta) -> None:
        for end in self.ends:
            end.set_timeout(timeout)
        self._take_fast_path()  # a fast path keeps the timeout that it was made with

    def abort(self, reason: str = "abort() was called") -> None:
        for end in self.ends:
            end.abort(reason)

    def close(self) -> None:
        with contextlib.ExitStack() as closing:
            for end in reversed(self.ends):
                closing.callback(end.close)


def _device_of(values: Iterable[Any]) -> str | None:
    for value in values:
        if isinstance(value, Tensor):
            return value.device.type
        if isinstance(value, (list, tuple)):
            inner = _device_of(value)
            if inner is not None:
                return inner
    return None
