"""Agreement of all ranks about the mesh that they are to make."""

from __future__ import annotations

from typing import Any

from tilework.comm.operations.internal import agree_equal
from tilework.comm.world import get_rank, get_world_size
from tilework.mesh.devices import check_device_is_there
from tilework.mesh.spec import MeshSpec
from tilework.mesh.torch_names import backends_of_axes
from tilework.rendezvous.internal import starting


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
