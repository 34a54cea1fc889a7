"""A parameter of a fully sharded module: its shard, its place in the buffer, its full value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tilework.dtensor import DTensor, Replicate, Shard
from tilework.dtensor.spec import DTensorSpec, spec_of
from tilework.dtensor.tensor import wrap
from tilework.dtensor.torch_tensors import refuse_torch_dtensor
from tilework.layout import Placement, chunk_sizes, offsets_of
from tilework.mesh import DeviceMesh


@dataclass(eq=False)
class ShardedParam:
    """A parameter that is gathered for computation and sharded otherwise.

    Attributes:
        name: Its name in the module that was sharded.
        places: The modules and attributes that hold it: several where weights are shared.
        sharded: The parameter that the optimizer sees: a DTensor.
        full: The gathered parameter, whose memory is there while it is needed.
        shape: The shape of the full local tensor: with tensor parallelism, of this rank's part.
        dim: The dim that is sharded.
        sizes: The size of each rank's shard along it.
        offset: Where its shard begins in the flat buffer of a rank, in elements.
        padded: The elements that it takes there: those of the largest shard.
        requires_grad: True if the parameter that the optimizer sees requires a gradient now.
    """

    name: str
    places: list[tuple[nn.Module, str]]
    shape: tuple[int, ...]
    dim: int
    sizes: list[int]
    spec: DTensorSpec
    tensor_parallel: DTensorSpec | None
    required_grad: bool
    dtype: torch.dtype
    offset: int = 0
    sharded: Any = None
    full: Any = None
    full_local: Any = None
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def requires_grad(self) -> bool:
        if self.sharded is None:
            return self.required_grad
        return bool(self.sharded._local_tensor.requires_grad)

    @property
    def padded(self) -> int:
        """The elements of the largest rank's shard."""
        return (
            math.prod(self.shape[: self.dim])
            * self.sizes[0]
            * math.prod(self.shape[self.dim + 1 :])
        )

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the shard of a rank of the sharding group."""
        return (*self.shape[: self.dim], self.sizes[rank], *self.shape[self.dim + 1 :])

    def in_row(self, row: Tensor, rank: int) -> Tensor:
        """The view of a rank's flat buffer that is its shard, in the shard's shape."""
        shape = self.shard_shape(rank)
        return row[self.offset : self.offset + math.prod(shape)].view(shape)

    def of_full(self, full: Tensor, rank: int) -> Tensor:
        """The view of a full tensor that is a rank's shard."""
        return full.narrow(self.dim, offsets_of(self.sizes)[rank], self.sizes[rank])

    def rows_and_parts(self, rows: Tensor, full: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Pairs of equal elements: views of all ranks' flat buffers, and of the full tensor."""
        ranks = len(self.sizes)
        if self.dim == 0 and len(set(self.sizes)) == 1 and full.is_contiguous():
            inner = self.shard_shape(0)
            shards = rows[:, self.offset : self.offset + self.padded].view(ranks, *inner)
            return [(shards, full.view(ranks, *inner))]
        return [
            (self.in_row(rows[rank], rank), self.of_full(full, rank))
            for rank in range(ranks)
            if self.sizes[rank]
        ]

    def install(self, parameter: nn.Parameter) -> None:
        """Make the modules hold ``parameter``."""
        for module, name in self.places:
            module._parameters[name] = parameter


def sharded_param(
    name: str,
    places: list[tuple[nn.Module, str]],
    parameter: nn.Parameter,
    mesh: DeviceMesh,
    placement: Shard | None,
) -> ShardedParam:
    """The description of a parameter on a mesh; its values are not looked at. Local.

    Args:
        name: Its name.
        places: Where it is.
        parameter: The full parameter: plain, or a DTensor of tensor parallelism.
        mesh: One axis: shard along it. Two: replicate along the first.
        placement: The dim to shard; None: the first.

    Raises:
        TypeError: It is a DTensor of torch.distributed.tensor's.
        ValueError: The placement does not fit, or the meshes have no common root.
    """
    dim = placement.dim if placement is not None else 0
    value: Any = parameter
    refuse_torch_dtensor(value, f"fully_shard of parameter {name!r}")
    tensor_parallel = value._spec if isinstance(value, DTensor) else None
    local_shape = tuple(value._spec.local_shape if tensor_parallel else parameter.shape)
    if not -len(local_shape) <= dim < len(local_shape):
        raise ValueError(
            f"parameter {name} of shape {list(local_shape)} cannot be sharded along dim {dim}: "
            f"fully_shard needs a parameter with dims; pass shard_placement_fn, or ignored_params"
        )
    dim %= len(local_shape)
    ranks = mesh.shape[-1]
    sizes = chunk_sizes(local_shape[dim], ranks)
    spec = _spec(parameter, tensor_parallel, mesh, dim)
    return ShardedParam(
        name,
        places,
        local_shape,
        dim,
        sizes,
        spec,
        tensor_parallel,
        parameter.requires_grad,
        parameter.dtype,
        attributes={k: v for k, v in vars(parameter).items() if not k.startswith("_")},
    )


def _spec(
    parameter: nn.Parameter, tensor_parallel: DTensorSpec | None, mesh: DeviceMesh, dim: int
) -> DTensorSpec:
    """The layout of the sharded parameter."""
    own: list[Placement] = [*[Replicate()] * (mesh.ndim - 1), Shard(dim)]
    if tensor_parallel is None:
        return spec_of(mesh, own, parameter.shape)
    if tensor_parallel.mesh == mesh:
        raise ValueError(
            f"a parameter of shape {list(parameter.shape)} is sharded on {mesh} already: of nested "
            f"modules the inner ones are given to fully_shard first; tensor parallelism needs "
            f"another axis of the mesh"
        )
    whole = _mesh_of_both(mesh, tensor_parallel.mesh)
    placements: list[Placement] = [Replicate()] * whole.ndim
    axes = [[whole.spec.axis(name) for name in _names(m)] for m in (mesh, tensor_parallel.mesh)]
    for axis, placement in zip(axes[0], own, strict=True):
        placements[axis] = placement
    for axis, placement in zip(axes[1], tensor_parallel.placements, strict=True):
        placements[axis] = placement
    # A dim that both shard was sharded by tensor parallelism first.
    return spec_of(whole, placements, parameter.shape, order=(*axes[1], *axes[0]))


def _mesh_of_both(mesh: DeviceMesh, other: DeviceMesh) -> DeviceMesh:
    """The mesh of the axes of two meshes, in the order of the one that both are parts of."""
    root, names = mesh._root, (*_names(mesh), *_names(other))
    known, axes = _names(root), _root_axes(root, names)
    listed = [axis for each in axes.values() for axis in each]
    if (
        other._root is not root
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
    """The root's axes of each name that it knows."""
    axes = {}
    for name in names:
        try:
            axes[name] = root.root_axes(name)
        except KeyError:
            continue
    return axes


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    return mesh.mesh_dim_names or ()


def collect(
    modules: Sequence[nn.Module], ignored: set[nn.Parameter]
) -> list[tuple[str, list[tuple[nn.Module, str]], nn.Parameter]]:
    """The parameters that no inner fully_shard has taken, each once, with their places."""
    found: Found = {}
    for module in modules:
        _collect_into(found, module, "", ignored)
    return [(name, places, parameter) for parameter, (name, places) in found.items()]


#: For each parameter its first name, and the modules and attributes that hold it.
Found = dict[nn.Parameter, tuple[str, list[tuple[nn.Module, str]]]]


def _collect_into(found: Found, module: nn.Module, prefix: str, ignored: set[nn.Parameter]) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter not in ignored:
            first = found.setdefault(parameter, (f"{prefix}{name}", []))
            first[1].append((module, name))
    for name, child in module.named_children():
        if not hasattr(child, "_fsdp_state"):
            _collect_into(found, child, f"{prefix}{name}.", ignored)


def as_parameter(local: Tensor, param: ShardedParam) -> nn.Parameter:
    """The sharded parameter around this rank's shard."""
    value = nn.Parameter(wrap(local, param.spec), requires_grad=param.requires_grad)
    vars(value).update(param.attributes)
    return value
