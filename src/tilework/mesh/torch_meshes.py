"""Meshes of torch.distributed's."""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor

from tilework.comm.contract import ProcessGroup
from tilework.comm.world import current_world, native_group


def is_torch_mesh(value: Any) -> bool:
    """True if ``value`` is a mesh of torch.distributed."""
    kind = type(value)
    return kind.__name__ == "DeviceMesh" and kind.__module__.startswith("torch.distributed")


def adopt_torch_world() -> bool:
    """Make torch's default group tilework's default group, too, unless tilework made one itself.

    True if the default group has changed. Local.

    Raises:
        ValueError: tilework's default group numbers the ranks otherwise.
    """
    from torch.distributed import distributed_c10d

    default: Any = distributed_c10d._get_default_group()
    world = current_world()
    known = world.default_group
    group = native_group(default)
    assert isinstance(group, ProcessGroup)
    if known is None or (known in world.borrowed and known is not group):
        world.default_group = group
        return True
    if (known.rank(), known.size()) != (group.rank(), group.size()):
        raise ValueError(
            f"tilework's default group has this process as rank {known.rank()} of {known.size()}, "
            f"torch's as rank {group.rank()} of {group.size()}: their meshes are of other ranks"
        )
    return False


def torch_part(mesh: Any, names: tuple[str, ...] | None) -> Any:
    """The part of ``mesh``, a mesh of torch.distributed, along the axes ``names``. Local.

    None if ``mesh`` or ``names`` is None, or if torch refuses the names: it takes axes in the order
    of the mesh only, and any axis made by flattening.
    """
    if mesh is None or names is None:
        return None
    try:
        with warnings.catch_warnings():  # it warns of axes made by flattening
            warnings.simplefilter("ignore")
            return mesh[names if len(names) > 1 else names[0]]
    except (KeyError, RuntimeError):
        return None


def flattened_in_torch(mesh: Any, name: str) -> Any:
    """``mesh``, a mesh of torch.distributed, with all axes flattened to an axis ``name``.

    None if torch refuses, because the root mesh has an axis of that name. The first time this is
    collective over all ranks of torch's default group.
    """
    try:
        return mesh._flatten(name)
    except ValueError:
        return None


def new_torch_mesh(device_type: str, ranks: Tensor, names: tuple[str, ...] | None) -> Any:
    """A mesh of torch.distributed with new groups.

    Collective over all ranks of torch's default group.

    Raises:
        RuntimeError: torch.distributed is not initialized.
    """
    import torch.distributed as torch_dist
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

    if not torch_dist.is_initialized():
        raise RuntimeError(
            "torch's mesh needs torch's groups: call "
            'torch.distributed.init_process_group("tilework") first, on all ranks'
        )
    return TorchMesh(device_type, ranks, mesh_dim_names=names)
