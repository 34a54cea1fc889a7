"""Checks of the devices that meshes and tensors are to be on."""

from __future__ import annotations

import torch

from tilework.comm.world import get_rank


def check_device_type(device_type: str) -> None:
    """Raise RuntimeError unless ``device_type`` is a kind of device, as "cuda", without index."""
    try:
        if not isinstance(device_type, str | torch.device):
            raise RuntimeError
        index = torch.device(device_type).index if isinstance(device_type, str) else 0
    except RuntimeError:
        raise RuntimeError(
            f"device_type must be a kind of device that torch has, such as 'cpu' or 'cuda'; got "
            f"{device_type!r}"
        ) from None
    if index is not None:
        raise RuntimeError(
            f"device_type must be a kind of device without an index, such as 'cpu' or 'cuda': "
            f"each rank has its own device of that kind; got {device_type!r}"
        )


def check_device_is_there(device_type: str, what: str) -> None:
    """Raise RuntimeError if this process has no device of the kind ``device_type``.

    Args:
        device_type: The kind, such as "cuda".
        what: The name of the thing that needs the device, for the error.
    """
    if device_type in ("cpu", "meta"):
        return
    module = getattr(torch, device_type, None)
    available = getattr(module, "is_available", None)
    if available is not None and not available():
        raise RuntimeError(
            f"{what} needs {device_type} devices, and rank {get_rank()} has none: "
            f"torch.{device_type}.is_available() is False; use 'cpu', or a torch and a machine "
            f"with {device_type}"
        )
