"""RemoteDevice: a device of a rank or worker, the placement of a shard."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_FORMATS = "'rank:<rank>/<device>', '<worker name>/<device>' or '<device>'"


@dataclass(frozen=True, slots=True, init=False, repr=False)
class RemoteDevice:
    """The placement of a shard: a device, and the rank or the RPC worker that owns it.

    Args:
        remote_device: ``"rank:<rank>/<device>"`` (a global rank) or ``"<worker name>/<device>"``
                (a name given to :func:`tilework.rpc.init_rpc`); without ``/<device>`` the device is
                the owner's CPU. A device alone, as a string or a torch.device, is a device of this
                rank. A device without an index is the owner's current device.

    Raises:
        ValueError: The string is none of these.
        TypeError: It is neither a string nor a device.

    Example:
        >>> place = RemoteDevice("rank:2/cpu")
        >>> place.rank(), place.device(), str(place)
        (2, device(type='cpu'), 'rank:2/cpu')
    """

    _rank: int | None
    _worker: str | None
    _device: torch.device

    def __init__(self, remote_device: str | torch.device) -> None:
        if isinstance(remote_device, torch.device):
            self._set(None, None, remote_device)
        elif isinstance(remote_device, str):
            self._set(*_parse(remote_device))
        else:
            raise TypeError(
                f"a remote device is a string ({_FORMATS}) or a torch.device, "
                f"not {type(remote_device).__name__}"
            )

    def _set(self, rank: int | None, worker: str | None, device: torch.device) -> None:
        object.__setattr__(self, "_rank", rank)
        object.__setattr__(self, "_worker", worker)
        object.__setattr__(self, "_device", device)

    def rank(self) -> int | None:
        """The owner's global rank; None if the owner is given by a worker's name, or not at all."""
        return self._rank

    def worker_name(self) -> str | None:
        """The owner's name as an RPC worker; None if the owner is given by rank, or not at all."""
        return self._worker

    def device(self) -> torch.device:
        """The device, as the owner sees it."""
        return self._device

    def with_device(self, device: torch.device | str) -> RemoteDevice:
        """Another device of the same owner.

        Example:
            >>> RemoteDevice("rank:1/cpu").with_device("meta")
            RemoteDevice('rank:1/meta')
        """
        other = object.__new__(RemoteDevice)
        other._set(self._rank, self._worker, torch.device(device))
        return other

    def __str__(self) -> str:
        if self._rank is not None:
            return f"rank:{self._rank}/{self._device}"
        return str(self._device) if self._worker is None else f"{self._worker}/{self._device}"

    def __repr__(self) -> str:
        return f"RemoteDevice({str(self)!r})"

    def __reduce__(self) -> tuple[type[RemoteDevice], tuple[str]]:
        return RemoteDevice, (str(self),)


def covers(wanted: torch.device, device: torch.device) -> bool:
    """True if ``device`` is ``wanted``, or if ``wanted`` has no index and their types are equal.

    Example:
        >>> covers(torch.device("cuda"), torch.device("cuda:1"))
        True
    """
    return wanted.type == device.type and wanted.index in (None, device.index)


def _parse(text: str) -> tuple[int | None, str | None, torch.device]:
    owner, slash, device = text.partition("/")
    if not slash and (own := _device(owner)) is not None:
        return None, None, own
    remote = _device(device) if slash else torch.device("cpu")
    kind, colon, number = owner.partition(":")
    if remote is None or not owner:
        raise ValueError(f"Could not parse remote_device {text!r}: it must be {_FORMATS}")
    if not colon:
        return None, owner, remote
    if kind != "rank" or not (number.isascii() and number.isdigit()):
        raise ValueError(f"Could not parse remote_device {text!r}: it must be {_FORMATS}")
    return int(number), None, remote


def _device(text: str) -> torch.device | None:
    try:
        return torch.device(text)
    except RuntimeError:
        return None
