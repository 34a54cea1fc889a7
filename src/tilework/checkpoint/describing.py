"""The states of all ranks as one: common parts are saved once, the rest for each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard, cast

import torch
from torch import Tensor

from tilework.checkpoint.flat_state import FlatState, FlatValue, NamedTensor, PerRank, dotted
from tilework.checkpoint.format import Path
from tilework.checkpoint.index_text import unique_name
from tilework.checkpoint.save_planning import TensorToSave
from tilework.checkpoint.stateful_objects import is_lazy
from tilework.checkpoint.tensor_bytes import dtype_name, full_crc32
from tilework.checkpoint.values import KIND
from tilework.comm.per_call.internal import has_memory, lacks_memory
from tilework.dtensor import DTensor
from tilework.dtensor.internal import layout_of
from tilework.layout import Box, Partial, Replicate
from tilework.layout.internal import whole_box
from tilework.sharded import ShardedTensorBase
from tilework.tiled import TiledTensor

#: The facts of a leaf that ranks exchange: the kind, and plain data.
Facts = tuple[Any, ...]


class Description(NamedTuple):
    """The description of one rank's state, for the other ranks.

    ``contents`` has, by path, the CRC-32s of this rank's tiles that have elements; only for tensors
    that some of the ranks do not hold.
    """

    leaves: dict[Path, Facts]
    containers: dict[Path, str]
    contents: dict[Path, tuple[int, ...]]


@dataclass
class MergedState:
    """The state of all ranks.

    Args:
        sources: For each tensor, the path in the ranks' states, and the ranks that have it there.
        aliases: From further names of tensors to the names under which they are saved.
    """

    flat: FlatState
    tensors: list[TensorToSave]
    sources: list[tuple[Path, tuple[int, ...]]]
    aliases: dict[str, str]


def is_partial(leaf: Any) -> TypeGuard[DTensor]:
    """True for a tensor whose values are not reduced yet."""
    return isinstance(leaf, DTensor) and bool(layout_of(leaf).partial_axes)


def settle(flat: FlatState) -> None:
    """Replace partial tensors in ``flat`` by their sums or other results. Collective."""
    for path, leaf in flat.leaves.items():
        if is_partial(leaf):
            placements = [Replicate() if isinstance(p, Partial) else p for p in leaf.placements]
            with torch.no_grad():
                detached = cast(DTensor, leaf.detach())
                flat.leaves[path] = detached.redistribute(placements=placements)


def describe(flat: FlatState, ranks: Sequence[int]) -> Description:
    """This rank's description. Local. A single rank compares no contents."""
    description = Description({}, dict(flat.containers), {})
    seen: dict[Any, Path] = {}
    for path, leaf in flat.leaves.items():
        description.leaves[path] = _facts(path, leaf, seen, len(ranks) == 1)
        if isinstance(leaf, TiledTensor) and not set(leaf.tiling.ranks).issuperset(ranks):
            tiles = [tile for tile in leaf.local_tiles() if tile.numel()]
            description.contents[path] = tuple(full_crc32(tile) for tile in tiles)
    return description


def _facts(path: Path, leaf: Any, seen: dict[Any, Path], is_alone: bool) -> Facts:
    if isinstance(leaf, FlatValue):
        return "value", leaf.json
    where = f"the tensor {dotted(path)!r}"
    check_dense(leaf, where)
    dtype, shape = dtype_name(leaf.dtype, where), tuple(leaf.shape)
    if isinstance(leaf, TiledTensor):
        return "tiles", dtype, shape, tiles_of(leaf), layout_text(leaf)
    if leaf.numel():
        signs = leaf.is_conj(), leaf.is_neg()
        key = (leaf.data_ptr(), shape, leaf.stride(), leaf.dtype, signs, str(leaf.device))
        first = seen.setdefault(key, path)
        if first != path:
            return "alias", first
    return "plain", dtype, shape, 0 if is_alone else full_crc32(leaf)


def check_dense(tensor: Tensor, where: str) -> None:
    """Raise TypeError unless a tensor is dense, with values in memory."""
    for tile in local_parts(tensor):
        _check_plain(tile, where)


def local_parts(tensor: Tensor) -> Sequence[Tensor]:
    """The tensors with a tensor's elements on this rank: the tiles, or the tensor itself."""
    return tensor.local_tiles() if isinstance(tensor, TiledTensor) else [tensor]


def _check_plain(leaf: Tensor, where: str) -> None:
    if is_lazy(leaf):
        kind, instead = "not initialised", "call its module once, or give it a shape, first"
    elif leaf.is_nested:
        kind, instead = "nested", "save its values() and offsets(), or its parts"
    elif leaf.layout is not torch.strided:
        kind, instead = f"sparse ({leaf.layout})", "save its to_dense(), or its indices and values"
    elif leaf.is_quantized:
        kind, instead = f"quantized ({leaf.dtype})", "save its int_repr() and its scales"
    elif lacks_memory(leaf):
        kind, instead = "on the device 'meta', without values", "give it values first"
    elif not (leaf.is_meta or has_memory(leaf)):
        kind = f"a {type(leaf).__name__} without memory"
        instead = "save the tensors that it holds"
    else:
        return
    raise TypeError(f"{where} is {kind}, and a checkpoint holds only dense tensors: {instead}")


def tiles_of(tensor: TiledTensor) -> tuple[tuple[Any, ...], ...]:
    """The boxes with elements and their owners, as plain data; all boxes if all are empty."""
    tiles = [tile for tile in tensor.tiling.tiles if not tile.box.empty]
    return tuple((t.box.offsets, t.box.sizes, t.owners) for t in tiles or tensor.tiling.tiles)


def layout_text(tensor: TiledTensor) -> str:
    """The layout in a line, for people."""
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
        axes = ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))
        return f"DTensor {list(tensor.placements)} on mesh ({axes})"
    if isinstance(tensor, ShardedTensorBase):
        return repr(tensor)[:200]
    return type(tensor).__name__


def merge(descriptions: Sequence[Description], ranks: Sequence[int]) -> MergedState:
    """The state of all ranks as one. Pure, and the same on every rank."""
    descriptions = _empty_as_values(descriptions)
    merger, by_path = _Merger(), dict[Path, dict[Facts, list[int]]]()
    containers = merger.state.flat.containers
    # Ranks with equal states share a description.
    numbers_of: dict[int, list[int]] = {}
    for number, description in enumerate(descriptions):
        numbers_of.setdefault(id(description), []).append(number)
    for numbers in numbers_of.values():
        description = descriptions[numbers[0]]
        _merge_containers(containers, description.containers, ranks[numbers[0]])
        for path, facts in description.leaves.items():
            # A value may hold lists and dicts.
            key = ("value", repr(facts[1])) if facts[0] == "value" else facts
            by_path.setdefault(path, {}).setdefault(key, []).extend(numbers)
    for path, variants in by_path.items():
        if path in containers:
            raise ValueError(
                f"{dotted(path)} is a container on some ranks and a value on others: all ranks "
                f"must save states of one structure"
            )
        alike = sorted(map(sorted, variants.values()))
        found = [(descriptions[each[0]].leaves[path], each) for each in alike]
        found = _copies_as_one(path, found, descriptions, ranks)
        leaves = []
        for facts, numbers in found:
            owners = tuple([ranks[number] for number in numbers])
            suffix = f"@{owners[0]}" if len(found) > 1 else ""
            leaves.append((owners, merger.leaf(path, facts, owners, suffix)))
        merger.state.flat.leaves[path] = PerRank(tuple(leaves)) if len(leaves) > 1 else leaves[0][1]
    return merger.state


def _empty_as_values(descriptions: Sequence[Description]) -> list[Description]:
    """The descriptions, where empty sequences are values if another rank has a value."""
    distinct = {id(each): each for each in descriptions}
    leaves = [leaf for each in distinct.values() for leaf in each.leaves.items()]
    values = {path for path, facts in leaves if facts[0] == "value"}
    for key, each in distinct.items():
        filled = {path[:-1] for path in (*each.leaves, *each.containers) if path}
        empty: dict[Path, Facts] = {
            path: ("value", [] if kind == "list" else {KIND: kind, "v": []})
            for path, kind in each.containers.items()
            if path in values and path not in filled and kind in ("list", "tuple")
        }
        if empty:
            containers = {path: kind for path, kind in each.containers.items() if path not in empty}
            distinct[key] = each._replace(leaves=each.leaves | empty, containers=containers)
    return [distinct[id(each)] for each in descriptions]


def _copies_as_one(
    path: Path,
    variants: list[tuple[Facts, list[int]]],
    descriptions: Sequence[Description],
    ranks: Sequence[int],
) -> list[tuple[Facts, list[int]]]:
    """Merge the variants into one if they are replicas of one tensor, saved once."""
    if len(variants) == 1 or any(facts[0] != "tiles" for facts, _ in variants):
        return variants
    kind, dtype, shape, tiles, layout = variants[0][0]
    owners: dict[Any, list[int]] = {(offsets, sizes): [] for offsets, sizes, _ in tiles}
    contents: dict[Any, int] = {}
    for (_, other_dtype, other_shape, others, _), numbers in variants:
        boxes = {(offsets, sizes): held for offsets, sizes, held in others}
        if (other_dtype, other_shape, boxes.keys()) != (dtype, shape, owners.keys()):
            return variants
        for box, held in boxes.items():
            owners[box] += held
        for number in numbers:
            own = [box for box, held in boxes.items() if ranks[number] in held and all(box[1])]
            checksums = descriptions[number].contents.get(path, ())
            if len(own) != len(checksums):
                return variants
            for box, checksum in zip(own, checksums, strict=True):
                if contents.setdefault(box, checksum) != checksum:
                    return variants
    merged = tuple((*box, tuple(held)) for box, held in owners.items())
    together = sorted(number for _, numbers in variants for number in numbers)
    return [((kind, dtype, shape, merged, layout), together)]


class _Merger:
    def __init__(self) -> None:
        self.state = MergedState(FlatState(), [], [], {})
        self._names: set[str] = set()
        self._name_of: dict[Path, str] = {}

    def leaf(
        self, path: Path, facts: Facts, owners: tuple[int, ...], suffix: str
    ) -> FlatValue | NamedTensor:
        if facts[0] == "value":
            return FlatValue(facts[1])
        name = unique_name(f"{dotted(path)}{suffix}", self._names)
        if facts[0] == "alias":
            first = self._name_of.get(facts[1])
            if first is None:
                raise ValueError(
                    f"{dotted(path)} is the same tensor as {dotted(facts[1])}, which differs "
                    f"between ranks: save one of them"
                )
            self.state.aliases[name] = first
            return NamedTensor(name)
        _, dtype, shape, contents, *rest = facts
        if facts[0] == "plain":
            tiles: Any = ((whole_box(shape), owners),)
        else:
            tiles = tuple((Box(offsets, sizes), tuple(held)) for offsets, sizes, held in contents)
        self.state.tensors.append(TensorToSave(name, dtype, shape, tiles, *rest))
        self.state.sources.append((path, owners))
        if not suffix:
            self._name_of[path] = name
        return NamedTensor(name)


def _merge_containers(merged: dict[Path, str], own: Mapping[Path, str], rank: int) -> None:
    for path, kind in own.items():
        if merged.setdefault(path, kind) != kind:
            raise ValueError(
                f"{dotted(path)} is a {kind} on rank {rank} and a {merged[path]} on others: all "
                f"ranks must save states of one structure"
            )


def local_view(leaf: Tensor, box: Box, rank: int) -> Tensor:
    """The view of this rank's memory for a box within a local tile of a tensor."""
    if not isinstance(leaf, TiledTensor):
        return leaf.detach()[box.slices]
    for held, tile in zip(leaf.tiling.boxes_of(rank), leaf.local_tiles(), strict=True):
        if held == box:
            return tile.detach()
        if held.contains(box) and not (held.empty and not box.empty):
            return tile.detach()[box.relative_to(held).slices]
    raise ValueError(f"rank {rank} does not hold {box}")
