"""The layout of the tensor of which the ranks' local tensors are shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tilework.comm.contract import ProcessGroup
from tilework.comm.operations.internal import agree, are_alike, check_equal
from tilework.dtensor.propagation.dtensor_call import content_hash
from tilework.dtensor.provenance.digests import agreeing, stable_digest
from tilework.dtensor.provenance.replicas import compare_replicas
from tilework.dtensor.spec import DTensorSpec, Ints, spec_of
from tilework.dtensor.torch_tensors import refuse_torch_dtensor
from tilework.layout import Placement, Shard
from tilework.layout.internal import check_placements, existing_dim, infer_splits, whole_numbers
from tilework.mesh import DeviceMesh
from tilework.tiled import TiledTensor


def check_local_tensor(local: Any) -> None:
    """Raise TypeError unless the argument is a plain dense tensor."""
    refuse_torch_dtensor(local, "from_local")
    if not isinstance(local, Tensor) or isinstance(local, TiledTensor):
        raise TypeError(
            f"from_local takes this rank's part as a plain tensor, got {type(local).__name__}"
        )
    if local.layout is not torch.strided or local.is_nested:
        raise TypeError(
            f"DTensors are dense, and from_local got a tensor "
            f"{'that is nested' if local.is_nested else f'of {local.layout}'}: make it dense "
            f"first, with to_dense() or to_padded_tensor()"
        )


def checked_shape(shape: Sequence[int] | None, stride: Sequence[int] | None) -> Ints | None:
    """The global shape that from_local is given; ValueError if shape or strides are malformed."""
    if shape is not None:
        shape = whole_numbers(shape, "shape has a size for each dim, as (4, 3)")
        if min(shape, default=0) < 0:
            raise ValueError(f"shape must have sizes of 0 or more, got {shape}")
    if stride is not None:
        stride = whole_numbers(stride, "stride has a whole number for each dim, as (3, 1)")
        if shape is None or len(stride) != len(shape):
            raise ValueError("pass shape and stride together, with an entry of each for each dim")
    return shape


def spec_from_local(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int] | None,
    order: Sequence[int] | None,
    run_check: bool,
) -> DTensorSpec:
    """The layout of the tensor with this local tensor; ranks compare. May be collective."""
    if shape is not None and not run_check:
        return _checked(local, spec_of(mesh, placements, shape, order), shape)
    if not mesh.here:
        return _outside(local, mesh, placements, shape, order)

    def facts() -> _Facts:
        return _facts(local, mesh, placements, shape, order, run_check)

    def infer(found: Sequence[_Facts]) -> DTensorSpec:
        return _spec_from_facts(found, mesh, placements, shape, order)

    if run_check:
        with agreeing("from_local"):
            return infer(agree(facts, mesh.axes_group(range(mesh.ndim))))
    kind = "from_local", *placements, None if order is None else repr(order)
    key = kind, local.shape, local.dtype, local.requires_grad
    #: The digest of the facts, the layout once it is known, and the group; None: nothing is asked.
    known: tuple[int, DTensorSpec | None, ProcessGroup | None] | None = mesh.specs.get(key)
    if known is None and not _is_sharded(placements, mesh):
        whole = spec_of(mesh, placements, local.shape, order)
        known = mesh.specs[key] = 0, _checked(local, whole, None), None
    digest, spec, group = known or (_digest_of(facts), None, mesh.axes_group(range(mesh.ndim)))
    if group is None:
        assert spec is not None
        return spec
    with agreeing("from_local"):
        if not (are_alike(digest, group) and digest):
            spec = _inferred_from(agree(facts, group), kind, mesh, infer)
        elif spec is None:
            spec = infer([facts()] * group.size())
            mesh.specs[key] = digest, spec, group
    compare_replicas(local, spec)
    return spec


def _is_sharded(placements: Sequence[Placement], mesh: DeviceMesh) -> bool:
    """True if an axis of several ranks shards."""
    return any(
        isinstance(placement, Shard) and length > 1
        for placement, length in zip(placements, mesh.shape, strict=False)
    )


def _inferred_from(
    facts: Sequence[_Facts], kind: Any, mesh: DeviceMesh, infer: Callable[[Any], DTensorSpec]
) -> DTensorSpec:
    """The layout that follows from the facts of ranks, which differ."""
    key = kind, tuple(facts)
    spec: DTensorSpec | None = mesh.specs.get(key)
    if spec is None:
        spec = mesh.specs[key] = infer(facts)
    return spec


def _digest_of(make: Callable[[], _Facts]) -> int:
    """The digest of this rank's facts; 0 if there is something wrong with them."""
    try:
        return stable_digest(make())
    except Exception:  # is raised on all ranks
        return 0


def _outside(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int] | None,
    order: Sequence[int] | None,
) -> DTensorSpec:
    """The layout on a rank outside the mesh, which assumes even shards like ``local``."""
    if shape is None:
        shape = shape_of_equals(local, mesh, placements)
    return spec_of(mesh, placements, shape, order)


def shape_of_equals(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> list[int]:
    """The global shape, if the local tensor of every rank has the shape of ``local``."""
    extents = list(local.shape)
    for placement, length in zip(placements, mesh.shape, strict=False):
        if isinstance(placement, Shard) and -local.ndim <= placement.dim < local.ndim:
            dim = placement.dim % local.ndim
            extents[dim] = sum(placement.sizes) if placement.sizes else extents[dim] * length
    return extents


def _checked(local: Tensor, spec: DTensorSpec, shape: Sequence[int] | None) -> DTensorSpec:
    """The spec. Raise if this rank's local tensor does not fit the spec."""
    if spec.takes_part and local.shape != spec.local_shape:
        of_shape = "" if shape is None else f" of shape {list(shape)}"
        raise ValueError(
            f"of a tensor{of_shape} with placements {list(spec.placements)}, this rank, at "
            f"{spec.mesh.get_coordinate()} of the mesh, has a part of shape "
            f"{list(spec.local_shape)}, but the local tensor has shape {list(local.shape)}"
        )
    return spec


#: Shape, dtype, requires_grad, the layout as text, and a hash of the values if asked for.
_Facts = tuple[Ints, str, bool, str, str]


def _facts(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int] | None,
    order: Sequence[int] | None,
    run_check: bool,
) -> _Facts:
    check_placements(mesh.shape, placements, order)
    layout = _layout_text(
        tuple(placements),
        None if order is None else tuple(order),
        None if shape is None else tuple(shape),
    )
    for placement in placements:
        if isinstance(placement, Shard):
            existing_dim(placement.dim, tuple(local.shape))
    values = content_hash(local) if run_check else ""
    return tuple(local.shape), str(local.dtype), local.requires_grad, layout, values


@lru_cache(maxsize=1024)
def _layout_text(placements: tuple[Placement, ...], order: Ints | None, shape: Ints | None) -> str:
    text = f"placements {list(placements)}"
    if order is not None:
        text += f" in the order {list(order)}"
    return text if shape is None else f"{text} and shape {list(shape)}"


def _spec_from_facts(
    facts: Sequence[_Facts],
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int] | None,
    order: Sequence[int] | None,
) -> DTensorSpec:
    ranks = mesh.axes_group(range(mesh.ndim)).global_ranks
    check_equal(
        [
            {"dtype": dtype, "requires_grad": requires_grad, "layout": layout}
            for _, dtype, requires_grad, layout, _ in facts
        ],
        ranks,
        "parts of one tensor must have the same {name}:",
    )
    shapes = dict(zip(ranks, (its[0] for its in facts), strict=True))
    if shape is None:
        spec = _inferred(shapes, mesh, placements, order)
    else:
        spec = spec_of(mesh, placements, shape, order)
    _check_shapes(shapes, spec)
    _check_replicas(dict(zip(ranks, (its[4] for its in facts), strict=True)), spec)
    return spec


def _inferred(
    shapes: Mapping[int, Ints],
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    order: Sequence[int] | None,
) -> DTensorSpec:
    """The layout that gives each rank a local tensor of the shape listed for the rank."""
    ndim = len(next(iter(shapes.values())))
    if any(len(shape) != ndim for shape in shapes.values()):
        raise ValueError(
            f"local tensors must have the same number of dims on all ranks, got shapes "
            f"{_listed(shapes)}"
        )
    axes_of: dict[int, list[int]] = {dim: [] for dim in range(ndim)}
    dealt: set[int] = set()
    for axis in order or range(mesh.ndim):
        placement = placements[axis]
        if isinstance(placement, Shard):
            axes_of[placement.dim % ndim].append(axis)
            if placement.turns > 1:
                dealt.add(placement.dim % ndim)
    inferred = list(placements)
    extents = []
    for dim, axes in axes_of.items():
        sizes = sizes_along(shapes, mesh, dim, axes)
        extents.append(sum(sizes))
        if dim in dealt:
            continue  # sizes do not tell who has which block: the placements have to
        splits = infer_splits(sizes, [mesh.shape[axis] for axis in axes])
        if splits is None:
            raise ValueError(
                f"{_misfit(shapes, placements)}: dim {dim} would have shards of sizes {sizes}"
            )
        for axis, parts in zip(axes, splits, strict=True):
            placement = placements[axis]
            assert isinstance(placement, Shard)
            inferred[axis] = Shard(dim, placement.sizes or parts)
    try:
        return spec_of(mesh, inferred, extents, order)
    except ValueError as error:
        raise ValueError(f"{_misfit(shapes, placements)}: {error}") from error


def sizes_along(
    shapes: Mapping[int, Ints], mesh: DeviceMesh, dim: int, axes: Sequence[int]
) -> list[int]:
    """The sizes of a dim's shards along ``axes``, the outermost first, by local shapes."""
    sizes = []
    for places in product(*[range(mesh.shape[axis]) for axis in axes]):
        coordinate = [0] * mesh.ndim
        for axis, place in zip(axes, places, strict=True):
            coordinate[axis] = place
        sizes.append(shapes[mesh.spec.at(coordinate)][dim])
    return sizes


def _check_shapes(shapes: Mapping[int, Ints], spec: DTensorSpec) -> None:
    """Raise if the layout gives a rank another local shape than the rank has."""
    for rank, shape in shapes.items():
        if spec.sizes_at(_coordinate(rank, spec)) != shape:
            raise ValueError(
                f"{_misfit(shapes, spec.placements)}: of a tensor of shape {list(spec.shape)}, "
                f"rank {rank} would have {list(spec.sizes_at(_coordinate(rank, spec)))}"
            )


def _coordinate(rank: int, spec: DTensorSpec) -> Ints:
    coordinate = spec.mesh.spec.coordinate(rank)
    assert coordinate is not None
    return coordinate


def _misfit(shapes: Mapping[int, Ints], placements: Sequence[Placement]) -> str:
    return (
        f"local tensors of shapes {_listed(shapes)} do not form one tensor with placements "
        f"{list(placements)}: a dim that no axis shards must have one size on all ranks, and an "
        f"axis must split a dim at the same places everywhere"
    )


def _listed(shapes: Mapping[int, Ints]) -> str:
    texts = [f"{list(shape)} on rank {rank}" for rank, shape in shapes.items()]
    return ", ".join(texts if len(texts) <= 8 else [*texts[:8], "…"])


def _check_replicas(values: Mapping[int, str], spec: DTensorSpec) -> None:
    """Raise if replicas of one local tensor have different values."""
    first: dict[Ints, tuple[int, str]] = {}
    for rank, value in values.items():
        shard = tuple(
            0 if placement.is_replicate() else index
            for placement, index in zip(spec.placements, _coordinate(rank, spec), strict=True)
        )
        known, expected = first.setdefault(shard, (rank, value))
        if value != expected:
            raise ValueError(
                f"ranks {known} and {rank} are to have the same part of a tensor with placements "
                f"{list(spec.placements)}, but their values differ: broadcast one of them, or say "
                f"with the placements how they differ"
            )
