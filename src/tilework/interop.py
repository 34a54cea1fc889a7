"""Conversions between ShardedTensor and DTensor, which share their local tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import permutations, product

from tilework.comm.world import AnyGroup, get_rank
from tilework.dtensor import DTensor
from tilework.dtensor.internal import (
    DTensorSpec,
    Ints,
    empty_local,
    layout_of,
    refuse_torch_dtensor,
    sizes_along,
    spec_of,
    wrap,
)
from tilework.layout import Box, Placement, Replicate, Shard
from tilework.layout.internal import infer_splits, is_dealt
from tilework.mesh import DeviceMesh
from tilework.sharded import Shard as LocalShard
from tilework.sharded import (
    ShardedTensor,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
    infer_sharding_spec_from_shards_metadata,
)
from tilework.sharded.internal import Items


def to_dtensor(tensor: ShardedTensor, device_mesh: DeviceMesh) -> DTensor:
    """Convert a sharded tensor to a DTensor of the same shards, which shares their memory.

    Nothing is communicated.

    Args:
        tensor: A tensor with one shard on each rank of the mesh, and none on other ranks.
        device_mesh: The mesh whose axes shard it.

    Raises:
        ValueError: No placements on this mesh give these shards, or a rank of the mesh has no shard
            or several.
        TypeError: ``tensor`` is not a ShardedTensor.

    Example:
        >>> import torch
        >>> from tilework.dtensor import init_device_mesh, to_dtensor
        >>> from tilework.sharded import ChunkShardingSpec, shard_tensor
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     rows = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        ...     sharded = shard_tensor(torch.arange(6.0).view(3, 2), rows)
        ...     return to_dtensor(sharded, init_device_mesh("cpu", (2,)))
        >>> run_ranks(2, program)[0]
        DTensor f32[3@0, 2] on cpu mesh 0=2
    """
    if not isinstance(tensor, ShardedTensor):
        raise TypeError(f"to_dtensor takes a ShardedTensor, got {type(tensor).__name__}")
    spec = _infer_spec(_box_by_rank(tensor, device_mesh), tuple(tensor.shape), device_mesh)
    if not spec.takes_part:
        return wrap(empty_local(tensor), spec)
    return wrap(tensor.local_shards()[0].tensor, spec)


def _box_by_rank(tensor: ShardedTensor, mesh: DeviceMesh) -> dict[int, Box]:
    """The box (offsets and sizes) of the shard that each rank of ``mesh`` holds, by rank."""
    boxes: dict[int, Box] = {}
    for tile in tensor.tiling.tiles:
        for rank in tile.owners:
            if rank in boxes or rank not in mesh.spec.ranks:
                raise ValueError(
                    f"a DTensor has one part on each rank of the mesh, {list(mesh.spec.ranks)}, "
                    f"but {tensor!r} has "
                    f"{'several shards' if rank in boxes else 'a shard'} on rank {rank}: "
                    f"reshard it, or distribute its full_tensor()"
                )
            boxes[rank] = tile.box
    missing = [rank for rank in mesh.spec.ranks if rank not in boxes]
    if missing:
        raise ValueError(
            f"a DTensor has one part on each rank of the mesh, but {tensor!r} has none on ranks "
            f"{missing}"
        )
    return boxes


def _infer_spec(boxes: Mapping[int, Box], shape: Ints, mesh: DeviceMesh) -> DTensorSpec:
    """The spec by which each rank of ``mesh`` holds its box; ValueError if there is none."""
    for placements, order in _candidates(boxes, shape, mesh):
        try:
            spec = spec_of(mesh, placements, shape, order)
        except ValueError:
            continue  # sizes that are not the same everywhere
        if all(_has_box(spec, rank, box) for rank, box in boxes.items()):
            return spec
    listed = ", ".join(f"{box} on rank {rank}" for rank, box in list(boxes.items())[:8])
    raise ValueError(
        f"no placements on {mesh} cut a tensor of shape {list(shape)} into {listed}: reshard it "
        f"along the mesh's axes first, or distribute its full_tensor()"
    )


def _has_box(spec: DTensorSpec, rank: int, box: Box) -> bool:
    coordinate = spec.mesh.spec.coordinate(rank)
    assert coordinate is not None
    expected = spec.box_at(coordinate)
    return expected == box or (expected.empty and box.empty and expected.sizes == box.sizes)


def _candidates(
    boxes: Mapping[int, Box], shape: Ints, mesh: DeviceMesh
) -> Iterator[tuple[list[Placement], Ints]]:
    """Pairs of placements and order that may give these boxes."""
    shapes = {rank: box.sizes for rank, box in boxes.items()}
    choices = [range(len(shape)) if length > 1 else (None,) for length in mesh.shape]
    for dims in product(*choices):
        for order in permutations(range(mesh.ndim)):
            placements: list[Placement] = [Replicate()] * mesh.ndim
            for dim in {dim for dim in dims if dim is not None}:
                axes = [axis for axis in order if dims[axis] == dim]
                splits = infer_splits(
                    sizes_along(shapes, mesh, dim, axes), [mesh.shape[axis] for axis in axes]
                )
                if splits is None:
                    break
                for axis, sizes in zip(axes, splits, strict=True):
                    placements[axis] = Shard(dim, sizes)
            else:
                yield placements, order


def to_sharded(tensor: DTensor, process_group: AnyGroup = None) -> ShardedTensor:
    """Convert a DTensor to a sharded tensor of the same local tensors, which shares their memory.

    Nothing is communicated.

    Args:
        tensor: A tensor that is sharded along every axis of its mesh that is longer than 1.
        process_group: The group of the result; the default group if None.

    Raises:
        ValueError: ``tensor`` is replicated or partial along an axis that is longer than 1, or
            another dim than the first is dealt in turns.
        TypeError: ``tensor`` is not a DTensor.

    Example:
        >>> import torch
        >>> from tilework.dtensor import Shard, distribute_tensor, init_device_mesh, to_sharded
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     mesh = init_device_mesh("cpu", (2,))
        ...     return to_sharded(distribute_tensor(torch.ones(3, 2), mesh, [Shard(0)]))
        >>> run_ranks(2, program)[0]
        ShardedTensor(float32[3, 2] in 2 chunks along dim 0 on ranks 0-1)
    """
    refuse_torch_dtensor(tensor, "to_sharded")
    if not isinstance(tensor, DTensor):
        raise TypeError(f"to_sharded takes a DTensor, got {type(tensor).__name__}")
    spec = layout_of(tensor)
    for axis, (placement, length) in enumerate(zip(spec.placements, spec.mesh.shape, strict=True)):
        if length > 1 and not isinstance(placement, Shard):
            raise ValueError(
                f"a sharded tensor has each element once, but {tensor!r} is {placement} along "
                f"axis {axis}: redistribute it to Shard there"
            )
    if any(map(is_dealt, spec.splits[1:])):
        raise ValueError(
            f"shards are contiguous in memory, and blocks of {tensor!r}, dealt in turns along "
            f"another dim than the first, are not: redistribute it to Shard without turns"
        )
    here = get_rank()
    shards: list[ShardMetadata] = []
    local_shards: list[LocalShard] = []
    for rank in spec.mesh.spec.ranks:
        coordinate = spec.mesh.spec.coordinate(rank)
        assert coordinate is not None
        held = [
            ShardMetadata(box.offsets, box.sizes, f"rank:{rank}/{tensor.device.type}")
            for box in spec.boxes_at(coordinate)
        ]
        shards += held
        if rank == here:
            local_shards += map(LocalShard, spec.tiles_of(tensor.to_local()), held)
    properties = TensorProperties(tensor.dtype, requires_grad=tensor.requires_grad)
    return ShardedTensor.from_local_shards_and_global_metadata(
        local_shards,
        ShardedTensorMetadata(Items(shards), spec.size, properties),
        process_group,
        sharding_spec=infer_sharding_spec_from_shards_metadata(shards),
    )
