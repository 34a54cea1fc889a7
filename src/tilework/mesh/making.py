"""Meshes of a program: of all ranks in their order, and the mesh of ``with mesh:``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tilework.comm.groups import init_process_group
from tilework.comm.world import current_world, get_world_size, is_initialized
from tilework.mesh.device_mesh import DeviceMesh
from tilework.mesh.devices import check_device_type
from tilework.mesh.grid import MeshesOfRank
from tilework.mesh.same_mesh import ranks_there
from tilework.mesh.spec import MeshSpec
from tilework.mesh.torch_meshes import is_torch_mesh


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Iterable[str] | None = None,
    backend_override: Any = None,
) -> DeviceMesh:
    """A mesh of all ranks, in their order. Collective over all ranks; blocks.

    Args:
        device_type: Where tensors on the mesh live.
        mesh_shape: The number of ranks along each axis; their product is the number of ranks.
        mesh_dim_names: A name for each axis.
        backend_override: As for :class:`DeviceMesh`.

    Raises:
        RuntimeError: The job has another number of ranks than the shape.
        ValueError: An axis would have no ranks.
        TypeError: The shape is one number, or has something else than numbers.

    Example:
        >>> from tilework.mesh import init_device_mesh
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        ...     return mesh["tp"].size(), mesh["tp", "dp"].shape
        >>> run_ranks(2, program)[0]
        (2, (2, 1))
    """
    if isinstance(mesh_shape, int):
        raise TypeError(
            f"mesh_shape has the number of ranks along each axis, such as ({mesh_shape},), "
            f"got {mesh_shape}"
        )
    check_device_type(device_type)
    spec = MeshSpec.regular(mesh_shape, mesh_dim_names)
    if not is_initialized():
        init_process_group()
    if spec.size != get_world_size():
        raise RuntimeError(
            f"a mesh of shape {tuple(mesh_shape)} needs {spec.size} ranks, and there "
            f"{ranks_there(spec.size)}"
        )
    return DeviceMesh(device_type, spec, backend_override=backend_override)


def mesh_or_current(mesh: Any) -> DeviceMesh:
    """``mesh`` as a DeviceMesh; for None, the mesh of the innermost ``with mesh:`` block.

    A mesh of torch.distributed is converted by :meth:`DeviceMesh.from_torch`.

    Raises:
        RuntimeError: ``mesh`` is None, and there is no ``with mesh:`` block.
        TypeError: ``mesh`` is no mesh, or a mesh of torch's on groups of torch's own backends.
    """
    if mesh is None:
        return current_mesh()
    if isinstance(mesh, DeviceMesh):
        return mesh
    if is_torch_mesh(mesh):
        return DeviceMesh.from_torch(mesh)
    hint = "; placements come after the mesh" if isinstance(mesh, (list, tuple)) else ""
    raise TypeError(
        f"mesh must be a DeviceMesh, as init_device_mesh() makes, got {type(mesh).__name__}{hint}"
    )


def current_mesh() -> DeviceMesh:
    """The mesh of the innermost ``with mesh:`` block on this rank.

    Raises:
        RuntimeError: No mesh is active.

    Example:
        >>> from tilework.mesh import current_mesh, init_device_mesh
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     with init_device_mesh("cpu", (2,)) as mesh:
        ...         return current_mesh() is mesh
        >>> run_ranks(2, program)
        [True, True]
    """
    entered: list[DeviceMesh] = current_world().state(MeshesOfRank).entered
    if not entered:
        raise RuntimeError(
            "No device mesh is currently active: pass one, or use `with mesh:`. "
            'init_device_mesh("cpu", (n,)) makes one of n ranks'
        )
    return entered[-1]
