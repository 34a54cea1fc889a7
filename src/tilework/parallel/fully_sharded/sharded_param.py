"""A parameter of a fully sharded module: where modules hold it, and how it is divided."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tilework.dtensor import DTensor, Replicate, Shard
from tilework.dtensor.internal import (
    DTensorSpec,
    layout_of,
    local_tensor_of,
    refuse_torch_dtensor,
    spec_of,
)
from tilework.layout import Placement, chunk_sizes, offsets_of
from tilework.mesh import DeviceMesh
from tilework.parallel.data_parallel.leaves import grad_dtype_of

#: The modules and attributes that hold a parameter: several where weights are tied.
Places = list[tuple[nn.Module, str]]


@dataclass(eq=False)
class ShardedParam:
    """A parameter, as ``places`` hold it, that is gathered for computation, else ``sharded``."""

    name: str
    places: Places
    sharded: Any
    shape: tuple[int, ...]
    dim: int
    sizes: list[int]
    spec: DTensorSpec
    tensor_parallel: DTensorSpec | None
    #: The shape of each rank's shard.
    shard_shapes: list[tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        before, after = self.shape[: self.dim], self.shape[self.dim + 1 :]
        self.shard_shapes = [(*before, size, *after) for size in self.sizes]
        self.numel = math.prod(self.shape)
        #: The number of elements of each rank's shard, and of the largest.
        self.numels = list(map(math.prod, self.shard_shapes))
        self.padded = self.numels[0]
        #: True if each rank has elements that follow each other in the full tensor.
        self.is_range = math.prod(before) == 1
        #: True if the concatenation of all shards is the full tensor.
        self.is_even = self.is_range and len(set(self.sizes)) == 1

    @property
    def local(self) -> Tensor:
        """This rank's shard: a leaf of the graph; raises if the parameter was swapped since."""
        if type(self.sharded) is not DTensor:
            raise RuntimeError(
                f"parameter {self.name} was swapped with a {type(self.sharded).__name__} after the "
                f"forward pass whose backward needs it: call backward before that"
            )
        local: Tensor = local_tensor_of(self.sharded)
        return local

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """The dtype that the program gave the gradient; None: that of the parameter."""
        dtype = grad_dtype_of(self.local)
        return None if dtype == self.local.dtype else dtype

    def of_full(self, full: Tensor, rank: int) -> Tensor:
        """The part of the full tensor that is the shard of ``rank``, as a view."""
        return full.narrow(self.dim, offsets_of(self.sizes)[rank], self.sizes[rank])

    def by_rank(self, full: Tensor) -> Tensor:
        """A tensor that, cut into as many chunks of dim 0 as there are ranks, is all shards."""
        if self.is_range:
            return full.view(self.shape[self.dim :]) if self.dim else full
        rows = full.new_zeros(len(self.sizes), self.padded)
        for shard, part in self.shards_and_parts(rows, full):
            shard.copy_(part)
        return rows

    def shards_and_parts(self, shards: Tensor, full: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Pairs of views of the same elements: in all ranks' padded shards, and in the tensor."""
        if self.is_even:
            return [(shards, full.view(len(self.sizes), self.padded))]
        return [
            (shards[rank, : self.numels[rank]].view(shape), self.of_full(full, rank))
            for rank, shape in enumerate(self.shard_shapes)
            if self.sizes[rank]
        ]


def sharded_param(
    name: str,
    places: Places,
    parameter: Any,
    mesh: DeviceMesh,
    dim: int | None,
    on_mesh: bool = False,
) -> ShardedParam:
    """The description of a parameter; ``on_mesh``: a DTensor there already. Local."""
    refuse_torch_dtensor(parameter, f"fully_shard of parameter {name!r}")
    is_full = isinstance(parameter, DTensor) and not on_mesh
    tensor_parallel = layout_of(parameter) if is_full else None
    local_shape = tuple(parameter.shape if tensor_parallel is None else tensor_parallel.local_shape)
    if not local_shape:
        raise ValueError(
            f"parameter {name} of shape [] has no dim to shard: make it of shape [1], as "
            f"nn.Parameter(value.view(1)), or pass it in ignored_params, and average its gradient"
        )
    if dim is None:
        dim = _default_dim(parameter.shape, tensor_parallel, mesh.shape[-1])
    return ShardedParam(
        name,
        places,
        parameter,
        local_shape,
        dim,
        chunk_sizes(local_shape[dim], mesh.shape[-1]),
        _spec(name, parameter.shape, tensor_parallel, mesh, dim),
        tensor_parallel,
    )


def _default_dim(shape: torch.Size, tensor_parallel: DTensorSpec | None, ranks: int) -> int:
    """The first dim that has a row for each of the ranks, the same on all; 0 if there is none."""
    sizes = list(shape)
    if tensor_parallel is not None:
        for placement, parts in zip(
            tensor_parallel.placements, tensor_parallel.mesh.shape, strict=True
        ):
            if isinstance(placement, Shard):
                sizes[placement.dim] //= parts
    return next((dim for dim, size in enumerate(sizes) if size >= ranks), 0)


def dim_of(name: str, parameter: nn.Parameter, placement: Any) -> int | None:
    """The dim that a placement function chose, checked."""
    if placement is None:
        return None
    if type(placement) is not Shard or placement.turns > 1:
        raise TypeError(
            f"shard_placement_fn returns Shard(dim) or None, got {placement!r} for {name}"
        )
    ndim = parameter.ndim
    if not -ndim <= placement.dim < ndim:
        raise ValueError(
            f"parameter {name} of shape {list(parameter.shape)} cannot be sharded along dim "
            f"{placement.dim}: shard_placement_fn returns a dim that the parameter has"
        )
    return placement.dim % ndim


def _spec(
    name: str, shape: torch.Size, tensor_parallel: DTensorSpec | None, mesh: DeviceMesh, dim: int
) -> DTensorSpec:
    """The sharded parameter's layout, on ``mesh`` and the mesh of tensor parallelism, if any."""
    own: list[Placement] = [*[Replicate()] * (mesh.ndim - 1), Shard(dim)]
    if tensor_parallel is None:
        return spec_of(mesh, own, shape)
    if tensor_parallel.mesh == mesh:
        raise ValueError(
            f"parameter {name} of shape {list(shape)} is sharded on {mesh} already: call "
            f"fully_shard on inner modules before outer modules; tensor parallelism needs another "
            f"axis of the mesh"
        )
    whole = _mesh_of_both(mesh, tensor_parallel.mesh)
    placements: list[Placement] = [Replicate()] * whole.ndim
    axes = [[whole.spec.axis(name) for name in _names(m)] for m in (mesh, tensor_parallel.mesh)]
    for axis, placement in zip(axes[0], own, strict=True):
        placements[axis] = placement
    for axis, placement in zip(axes[1], tensor_parallel.placements, strict=True):
        placements[axis] = placement
    # If both shard a dim, tensor parallelism sharded it first.
    return spec_of(whole, placements, shape, order=(*axes[1], *axes[0]))


def _mesh_of_both(mesh: DeviceMesh, other: DeviceMesh) -> DeviceMesh:
    """The mesh of the axes of two meshes, in the order of their common root."""
    root, names = mesh.root_mesh, (*_names(mesh), *_names(other))
    known, axes = _names(root), _root_axes(root, names)
    listed = [axis for each in axes.values() for axis in each]
    if (
        other.root_mesh is not root
        or len(axes) < mesh.ndim + other.ndim
        or len(set(listed)) < len(listed)
    ):
        raise ValueError(
            f"fully_shard on {mesh} and tensor parallelism on {other} need one mesh of which both "
            f"are parts: init_device_mesh(..., mesh_dim_names=('dp', 'tp')), then mesh['tp'] for "
            f"parallelize_module and mesh['dp'] for fully_shard"
        )
    return root[tuple(sorted(axes, key=lambda name: known.index(axes[name][0])))]


def _root_axes(root: DeviceMesh, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """For each name that the root mesh knows, the root's axes: several for flattened axes."""
    axes = {}
    for name in names:
        try:
            axes[name] = root.root_axes(name)
        except KeyError:
            continue
    return axes


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or ()
