"""Meshes of torch.distributed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tilework.comm.contract import ProcessGroup
from tilework.comm.world import current_world, native_group


def is_torch_mesh(value: Any) -> bool:
    """True if ``value`` is a mesh of torch.distributed."""
    kind = type(value)
    return kind.__name__ == "DeviceMesh" and kind.__module__.startswith("torch.distributed")


def adopt_torch_world() -> bool:
    """Make torch's default group tilework's, unless tilework made one; True if it changed."""
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
    """The part of a torch mesh along some axes; None if torch refuses the names, or their order."""
    if mesh is None or names is None:
        return None
    try:
        with warnings.catch_warnings():  # it warns of axes made by flattening
            warnings.simplefilter("ignore")
            return mesh[names if len(names) > 1 else names[0]]
    except (KeyError, RuntimeError):
        return None


def new_torch_mesh(device_type: str, ranks: Tensor, names: tuple[str, ...] | None) -> Any:
    """A torch mesh with new groups. Collective over all ranks of torch's default group."""
    import torch.distributed as torch_dist
    from torch.distributed.device_mesh import DeviceMesh as TorchMesh

    if not torch_dist.is_initialized():
        raise RuntimeError(
            "torch's mesh needs torch's groups: call "
            'torch.distributed.init_process_group("tilework") first, on all ranks'
        )
    return TorchMesh(device_type, ranks, mesh_dim_names=names)


def backends_of_axes(
    override: Any, names: Sequence[str] | None, ndim: int
) -> tuple[str | None, ...]:
    """The backend of the groups along each axis; None: the default group's backend."""
    if override is None:
        return (None,) * ndim
    if isinstance(override, str) or not isinstance(override, dict | list | tuple):
        raise TypeError(
            f"backend_override is a dict of backends by axis, such as {{'tp': 'gloo'}}, or a list "
            f"with a backend or None for each axis, got {override!r}"
        )
    if not isinstance(override, dict):
        if len(override) != ndim:
            raise ValueError(
                f"backend_override has one backend, or None, for each of the mesh's {ndim} axes; "
                f"got {len(override)}"
            )
        override = dict(enumerate(override))
    backends: dict[int, str | None] = {}
    for axis, backend in override.items():
        known = list(names or ())
        number = known.index(axis) if axis in known else axis
        if not isinstance(number, int) or not 0 <= number < ndim or number in backends:
            raise ValueError(
                f"backend_override names axis {axis!r}, which does not exist or is named twice; "
                f"the mesh has the axes {', '.join(known) or f'0 to {ndim - 1}'}"
            )
        backends[number] = _backend_name(backend)
    return tuple(backends.get(number) for number in range(ndim))


def _backend_name(backend: Any) -> str | None:
    name = backend[0] if isinstance(backend, tuple) and backend else backend
    if name is not None and not isinstance(name, str):
        raise TypeError(
            f"a backend in backend_override is a name, or a pair of a name and options, got "
            f"{backend!r} of type {type(backend).__name__}"
        )
    return name
