"""From what each rank has to the tensor that it is a part of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

from torch import Tensor

from tilework.comm.agreement import agree, check_equal
from tilework.dtensor.propagation.plain_inputs import content_hash
from tilework.dtensor.spec import DTensorSpec, Ints, spec_of
from tilework.layout import Placement, Shard
from tilework.layout.placements import check_placements
from tilework.layout.sharding import infer_splits
from tilework.mesh import DeviceMesh


def joined_spec(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int] | None,
    order: Sequence[int] | None,
    run_check: bool,
) -> DTensorSpec:
    """How the tensor lies of which each rank has ``local``.

    Collective over the mesh where the global shape depends on what others have, or with
    ``run_check``.

    Raises:
        ValueError: The parts do not fit together; on every rank if it is collective.
    """
    if shape is not None and not run_check:
        return _told(local, spec_of(mesh, placements, shape, order), shape)
    cut = any(
        isinstance(one, Shard) and length > 1
        for one, length in zip(placements, mesh.shape, strict=False)
    )
    if not mesh.here and cut:
        raise ValueError(
            "this rank is outside the mesh, so it cannot know the shape of a tensor that is cut: "
            "pass shape="
        )
    if not (cut or run_check) or not mesh.here:
        return _told(local, spec_of(mesh, placements, shape or local.shape, order), None)
    said = agree(
        lambda: _facts(local, mesh, placements, shape, order, run_check),
        mesh.axes_group(range(mesh.ndim)),
    )
    if run_check:
        return _joined(said, mesh, placements, shape, order)
    key = "joined", tuple(placements), None if order is None else tuple(order), tuple(said)
    found: DTensorSpec | None = mesh.specs.get(key)
    if found is None:
        found = mesh.specs[key] = _joined(said, mesh, placements, shape, order)
    return found


def _told(local: Tensor, spec: DTensorSpec, shape: Sequence[int] | None) -> DTensorSpec:
    """The spec, if this rank's part fits it."""
    if spec.takes_part and local.shape != spec.local_shape:
        given = "" if shape is None else f" of shape {list(shape)}"
        raise ValueError(
            f"of a tensor{given} that lies as {list(spec.placements)}, this rank, at "
            f"{spec.mesh.get_coordinate()} of the mesh, has a part of shape "
            f"{list(spec.local_shape)}, but the local tensor has shape {list(local.shape)}"
        )
    return spec


#: Shape, dtype, whether it requires a gradient, the layout in words, and the values if asked for.
_Facts = tuple[Ints, str, bool, str, str]


def _facts(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int] | None,
    order: Sequence[int] | None,
    run_check: bool,
) -> _Facts:
    layout = _in_words(
        tuple(placements),
        None if order is None else tuple(order),
        None if shape is None else tuple(shape),
    )
    check_placements(mesh.shape, placements, order)
    for placement in placements:
        if isinstance(placement, Shard) and not -local.ndim <= placement.dim < local.ndim:
            raise ValueError(
                f"{placement} cuts a dim that a tensor of shape {list(local.shape)} does not have"
            )
    values = content_hash(local) if run_check else ""
    return tuple(local.shape), str(local.dtype), local.requires_grad, layout, values


@lru_cache(maxsize=1024)
def _in_words(placements: tuple[Placement, ...], order: Ints | None, shape: Ints | None) -> str:
    words = f"placements {list(placements)}"
    if order is not None:
        words += f" in the order {list(order)}"
    return words if shape is None else f"{words} and shape {list(shape)}"


def _joined(
    said: Sequence[_Facts],
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int] | None,
    order: Sequence[int] | None,
) -> DTensorSpec:
    ranks = mesh.axes_group(range(mesh.ndim)).global_ranks
    check_equal(
        [
            {"dtype": dtype, "requires_grad": requires_grad, "layout": layout}
            for _, dtype, requires_grad, layout, _ in said
        ],
        ranks,
        "parts of one tensor must have the same {name}:",
    )
    shapes = dict(zip(ranks, (facts[0] for facts in said), strict=True))
    if shape is None:
        spec = _inferred(shapes, mesh, placements, order)
    else:
        spec = spec_of(mesh, placements, shape, order)
    _check_parts(shapes, spec)
    _check_copies(dict(zip(ranks, (facts[4] for facts in said), strict=True)), spec)
    return spec


def _inferred(
    shapes: Mapping[int, Ints],
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    order: Sequence[int] | None,
) -> DTensorSpec:
    """The layout whose parts have these shapes, by rank."""
    ndim = len(next(iter(shapes.values())))
    if any(len(shape) != ndim for shape in shapes.values()):
        raise ValueError(f"parts of one tensor have as many dims, got shapes {_listed(shapes)}")
    cuts: dict[int, list[int]] = {dim: [] for dim in range(ndim)}
    for axis in order or range(mesh.ndim):
        placement = placements[axis]
        if isinstance(placement, Shard):
            cuts[placement.dim % ndim].append(axis)
    found = list(placements)
    extents = []
    for dim, axes in cuts.items():
        sizes = sizes_along(shapes, mesh, dim, axes)
        extents.append(sum(sizes))
        splits = infer_splits(sizes, [mesh.shape[axis] for axis in axes])
        if splits is None:
            raise ValueError(
                f"{_misfit(shapes, placements)}: dim {dim} would have shards of sizes {sizes}"
            )
        for axis, parts in zip(axes, splits, strict=True):
            placement = placements[axis]
            assert isinstance(placement, Shard)
            found[axis] = Shard(dim, placement.sizes or parts)
    try:
        return spec_of(mesh, found, extents, order)
    except ValueError as error:
        raise ValueError(f"{_misfit(shapes, placements)}: {error}") from error


def sizes_along(
    shapes: Mapping[int, Ints], mesh: DeviceMesh, dim: int, axes: Sequence[int]
) -> list[int]:
    """The sizes of the shards of a dim, in order, on ranks that are the first along other axes.

    Args:
        shapes: The local shape of each rank.
        mesh: The ranks.
        dim: The dim.
        axes: The axes that shard it, the outermost first.
    """
    sizes = []
    for places in product(*[range(mesh.shape[axis]) for axis in axes]):
        coordinate = [0] * mesh.ndim
        for axis, place in zip(axes, places, strict=True):
            coordinate[axis] = place
        sizes.append(shapes[mesh.spec.at(coordinate)][dim])
    return sizes


def _check_parts(shapes: Mapping[int, Ints], spec: DTensorSpec) -> None:
    """That each rank has what the layout gives it."""
    for rank, shape in shapes.items():
        if spec.box_at(_place(rank, spec)).sizes != shape:
            raise ValueError(
                f"{_misfit(shapes, spec.placements)}: of a tensor of shape {list(spec.shape)}, "
                f"rank {rank} would have {list(spec.box_at(_place(rank, spec)).sizes)}"
            )


def _place(rank: int, spec: DTensorSpec) -> Ints:
    found = spec.mesh.spec.coordinate(rank)
    assert found is not None
    return found


def _misfit(shapes: Mapping[int, Ints], placements: Sequence[Placement]) -> str:
    return (
        f"local tensors of shapes {_listed(shapes)} are no parts of one tensor that lies as "
        f"{list(placements)}, where dims that are not cut have one size and an axis cuts alike "
        f"everywhere"
    )


def _listed(shapes: Mapping[int, Ints]) -> str:
    told = [f"{list(shape)} on rank {rank}" for rank, shape in shapes.items()]
    return ", ".join(told if len(told) <= 8 else [*told[:8], "…"])


def _check_copies(values: Mapping[int, str], spec: DTensorSpec) -> None:
    """That ranks which are to have the same have the same."""
    first: dict[Any, tuple[int, str]] = {}
    for rank, value in values.items():
        place = tuple(
            0 if one.is_replicate() else at
            for one, at in zip(spec.placements, _place(rank, spec), strict=True)
        )
        known, expected = first.setdefault(place, (rank, value))
        if value != expected:
            raise ValueError(
                f"ranks {known} and {rank} are to have the same part of a tensor that lies as "
                f"{list(spec.placements)}, but their values differ: broadcast one of them, or say "
                f"with the placements how they differ"
            )
