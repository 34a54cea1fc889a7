"""Checks of a mesh that ranks are to make: the kind of device, and agreement of all ranks."""

from __future__ import annotations

from typing import Any

import torch

from tilework.comm.operations.internal import agree_equal
from tilework.comm.world import get_rank, get_world_size
from tilework.mesh.spec import MeshSpec
from tilework.mesh.torch_meshes import backends_of_axes
from tilework.rendezvous.internal import starting


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


def ranks_there(needed: int) -> str:
    """The end of an error: the number of ranks of the job, and advice to get ``needed`` ranks."""
    size = get_world_size()
    if size > needed:
        return f"are {size}. Use DeviceMesh(…) for a mesh of some of the ranks"
    command = starting(needed) if size == 1 else ""
    if command:
        return f"is 1, since no launcher started this process: start it with `{command}`"
    return f"{'is' if size == 1 else 'are'} {size}: start the job with {needed}"


def check_same(device_type: str, spec: MeshSpec, override: Any) -> tuple[str | None, ...]:
    """Raise on every rank unless all ranks make the same mesh, of ranks that exist. Collective.

    Returns the backend of the groups along each axis; None: the default group's backend.
    """
    backends: tuple[str | None, ...] = ()

    def facts() -> dict[str, Any]:
        nonlocal backends
        backends = backends_of_axes(override, spec.names, spec.ndim)
        if spec.size > get_world_size() or max(spec.ranks) >= get_world_size():
            raise RuntimeError(
                f"Mesh should not be bigger than default world size {get_world_size()}, but found "
                f"{spec.size} ranks up to rank {max(spec.ranks)}: {spec.nested()}. There "
                f"{ranks_there(max(spec.ranks) + 1)}"
            )
        if get_rank() in spec.ranks:
            check_device_is_there(device_type, "a mesh")
        return {
            "device_type": device_type,
            "shape": spec.shape,
            "ranks": spec.ranks,
            "names": spec.names,
            "backends": backends,
        }

    agree_equal(facts, what="all ranks must make the same mesh:")
    return backends
