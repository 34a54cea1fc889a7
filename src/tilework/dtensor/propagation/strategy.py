"""Strategies: which factor each mesh axis shards, chosen so that the fewest bytes move."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from tilework.dtensor.spec import DTensorSpec, Ints, spec_of
from tilework.layout import Partial, Placement, Replicate, Shard, chunk_sizes
from tilework.layout.internal import (
    DEFAULT_COST,
    AxisChange,
    Cut,
    SeveralRangesError,
    Splits,
    axes_of,
    is_dealt,
    shard_at,
    shard_extents,
    shard_of,
    size_at,
)
from tilework.mesh import DeviceMesh
from tilework.tiled import Dim, DimFactors, Factor, FactorMap, volume


@dataclass(frozen=True)
class ShardFactor:
    """An axis shards a factor, which it splits in this way."""

    factor: Factor
    cut: Cut = None


@dataclass(frozen=True)
class KeepPartial:
    """Along an axis each rank computes with partial values of these inputs, reduced later."""

    inputs: frozenset[int]
    reduce_op: str


#: The role of an axis in an operator: it shards a factor, or keeps values partial. None: all ranks
#: along the axis compute the same.
Role = ShardFactor | KeepPartial | None


@dataclass(frozen=True, eq=False)
class Strategy:
    """A way to run an operator on a mesh.

    Args:
        mesh: The ranks.
        inputs: The layout that each input must have.
        outputs: The layout that each output then has.
        partial_grads: For each input, the axes along which the gradient comes out partial.
        roles: The role of each axis.
        order: The axes in the order in which they shard.
        cost: The price of redistributing the inputs, plus the least price of reducing partial
            outputs, in bytes as :meth:`~tilework.layout.CostModel.redistribution_bytes` counts.
    """

    mesh: DeviceMesh
    inputs: tuple[DTensorSpec, ...]
    outputs: tuple[DTensorSpec, ...]
    partial_grads: tuple[Ints, ...]
    roles: tuple[Role, ...]
    order: Ints
    cost: float

    def axes(self, factor: Factor) -> Ints:
        """The axes that shard a factor, the outermost first."""
        return axes_of(_splits(factor, self.roles, self.order))

    def local_range(self, factor: Factor) -> tuple[int, int]:
        """Offset and size of this rank's only shard of a factor; empty outside the mesh."""
        coordinate = self.mesh.get_coordinate()
        splits = _splits(factor, self.roles, self.order)
        if is_dealt(splits):
            raise SeveralRangesError(factor)
        if coordinate is None:
            return 0, 0
        return shard_at(factor.size, self.mesh.spec.shape, splits, coordinate)

    def is_sharded(self, factor: Factor) -> bool:
        """True if some axis shards a factor."""
        return any(isinstance(role, ShardFactor) and role.factor is factor for role in self.roles)

    @cached_property
    def has_empty_shards(self) -> bool:
        """True if some rank's shard of an input has no elements."""
        coordinates = list(itertools.product(*map(range, self.mesh.spec.shape)))
        return any(
            0 in spec.sizes_at(coordinate)
            for spec in set(self.inputs)
            for coordinate in coordinates
        )

    def local_size(self, dim: Dim) -> int:
        """The size of this rank's shard of a dim."""
        coordinate, lengths = self.mesh.get_coordinate(), self.mesh.spec.shape
        if coordinate is None:
            return 0 if dim else 1
        splits = [_splits(factor, self.roles, self.order) for factor in dim]
        return math.prod([
            size_at(factor.size, lengths, of_factor, coordinate)
            for factor, of_factor in zip(dim, splits, strict=True)
        ])  # fmt: skip


def choose(
    mapped: FactorMap,
    specs: Sequence[DTensorSpec],
    itemsizes: Sequence[int],
    out_shapes: Sequence[Ints] | None = None,
    fixed: Sequence[int] = (),
    in_ranges: Collection[Factor] = (),
) -> Strategy | None:
    """The cheapest strategy for an operator; None if there is none.

    Each axis has three kinds of candidates: to shard a factor that the axis shards in some input
    now, to keep partial inputs partial if the operator allows that, and to do nothing. An axis
    therefore shards a result only along a factor that it sharded in an input. Among strategies of
    equal cost, the strategy that shards more wins, then the strategy of the earlier input. Every
    rank finds the same strategy.

    Args:
        mapped: The operator's factor map.
        specs: The layouts of the inputs.
        itemsizes: Bytes of an element of each input.
        out_shapes: The outputs' shapes; None: the factors determine them.
        fixed: The numbers of inputs that are written in place. They must keep their layouts, and
            the first outputs have the same.
        in_ranges: The factors that no axis may deal in turns.
    """
    axes = range(len(specs[0].placements))
    candidates = [_roles(mapped, specs, axis, in_ranges) for axis in axes]
    shapes = out_shapes or [tuple(map(volume, dims)) for dims in mapped.outputs]
    best: Strategy | None = None
    for roles in itertools.product(*candidates):
        try:
            strategy = _Assignment(mapped, specs, roles).strategy(itemsizes, shapes)
        except _Infeasible:
            continue
        stay = all(
            strategy.inputs[number] == specs[number] == strategy.outputs[place]
            for place, number in enumerate(fixed)
        )
        if stay and (best is None or _rank(strategy) < _rank(best)):
            best = strategy
    return best


def _rank(strategy: Strategy) -> tuple[float, int]:
    return strategy.cost, sum(role is None for role in strategy.roles)


# -- candidates --------------------------------------------------------------------------------


def _roles(
    mapped: FactorMap, specs: Sequence[DTensorSpec], axis: int, in_ranges: Collection[Factor]
) -> list[Role]:
    """The candidates for the role of an axis."""
    roles: list[Role] = []
    for number, (spec, dims) in enumerate(zip(specs, mapped.inputs, strict=True)):
        placement = spec.placements[axis]
        if isinstance(placement, Shard):
            dim = dims[placement.dim]
            # The outermost factor that has elements to split: a shard of it is a range of the dim.
            factor = next((each for each in dim if each.size != 1), dim[0] if dim else None)
            if factor is None or factor.unshardable:
                continue
            cut = _factor_cut(placement, spec, axis, dim, factor)
            if not isinstance(cut, int) or factor not in in_ranges:
                roles.append(ShardFactor(factor, cut))
            roles.append(ShardFactor(factor))
        elif isinstance(placement, Partial):
            whole = any(each.placements[axis] != placement for each in specs)
            if whole and placement.reduce_op == mapped.extremum:
                # A full value would count on each rank: if it equals the extremum, it would get
                # more than a fair share of the gradient.
                continue
            roles += [
                KeepPartial(inputs, placement.reduce_op)
                for inputs in _partial_together(mapped, placement.reduce_op)
                if number in inputs
            ]
    return [*dict.fromkeys(roles), None]


def _partial_together(mapped: FactorMap, reduce_op: str) -> Sequence[frozenset[int]]:
    """The sets of inputs that may be partial together."""
    if mapped.rearranges or reduce_op == mapped.extremum:
        return [frozenset(range(len(mapped.inputs)))]
    return mapped.linear if reduce_op in ("sum", "avg") else ()


def _factor_cut(placement: Shard, spec: DTensorSpec, axis: int, dim: Dim, factor: Factor) -> Cut:
    """The way to split the factor as the dim is split; None: as ``torch.chunk`` does."""
    inner = math.prod(each.size for each in dim) // (factor.size or 1)
    sizes = placement.sizes
    alone = len(spec.axes_of(placement.dim)) == 1
    if placement.turns > 1:
        blocks = placement.turns * spec.mesh.spec.shape[axis]
        return placement.turns if _has_same_blocks(factor.size, inner, blocks, alone) else None
    if sizes is None and (inner == 1 or not alone):
        return None
    if sizes is None:
        sizes = tuple(chunk_sizes(spec.shape[placement.dim], spec.mesh.spec.shape[axis]))
    if inner == 0 or any(size % inner for size in sizes):
        return None
    of_factor = tuple(size // inner for size in sizes)
    return None if list(of_factor) == chunk_sizes(sum(of_factor), len(of_factor)) else of_factor


def _has_same_blocks(size: int, inner: int, blocks: int, alone: bool) -> bool:
    """True if blocks of a dim are blocks of its outermost factor, with ``inner`` elements each.

    If several axes shard the dim (``alone`` is False), only if both are the same.
    """
    of_dim, of_factor = chunk_sizes(size * inner, blocks), chunk_sizes(size, blocks)
    return inner == 1 or (alone and of_dim == [count * inner for count in of_factor])


# -- one assignment of roles -------------------------------------------------------------------


class _Infeasible(Exception):
    """An infeasible assignment of roles to axes."""


class _Assignment:
    """The roles of all axes, and the layouts that follow from them."""

    def __init__(
        self, mapped: FactorMap, specs: Sequence[DTensorSpec], roles: tuple[Role, ...]
    ) -> None:
        self._mapped, self._specs, self._roles = mapped, specs, roles
        self._mesh: DeviceMesh = specs[0].mesh
        self._order = _order(specs, roles)

    def strategy(self, itemsizes: Sequence[int], out_shapes: Sequence[Ints]) -> Strategy:
        """The strategy of these roles; raises _Infeasible if it cannot be written."""
        mapped, roles = self._mapped, self._roles
        inputs = tuple(
            self._layout(number, dims, spec.shape)
            for number, (dims, spec) in enumerate(zip(mapped.inputs, self._specs, strict=True))
        )
        outputs = tuple(
            self._layout(None, dims, shape)
            for dims, shape in zip(mapped.outputs, out_shapes, strict=True)
        )
        cost = sum(map(_redistribution_bytes, self._specs, inputs, itemsizes))
        cost += sum(_reduction_bytes(out, roles, max(itemsizes)) for out in outputs)
        grads = tuple(_partial_grads(spec, roles) for spec in inputs)
        return Strategy(self._mesh, inputs, outputs, grads, roles, self._order, cost)

    def _layout(self, number: int | None, dims: DimFactors, shape: Ints) -> DTensorSpec:
        """The layout that input ``number`` must have; for None, the layout that an output gets."""
        placements: list[Placement] = []
        for axis, role in enumerate(self._roles):
            if isinstance(role, ShardFactor):
                shard = self._shard(dims, axis, role)
                placements.append(shard or self._without(number, role.factor))
            elif isinstance(role, KeepPartial) and (number is None or number in role.inputs):
                placements.append(Partial(role.reduce_op))
            else:
                placements.append(Replicate())
        try:
            return spec_of(self._mesh, placements, shape, self._order)
        except ValueError:  # several reductions at once, or shards that no placement can express
            raise _Infeasible from None

    def _shard(self, dims: DimFactors, axis: int, role: ShardFactor) -> Shard | None:
        """The placement along an axis that shards a factor; None: no dim has the factor."""
        having = [number for number, dim in enumerate(dims) if role.factor in dim]
        if not having:
            return None
        dim = dims[having[0]]
        at = dim.index(role.factor)
        if len(having) > 1 or any(factor.size != 1 for factor in dim[:at]):
            raise _Infeasible
        inner = volume(dim[at + 1 :])
        length = self._mesh.shape[axis]
        if isinstance(role.cut, tuple):
            return Shard(having[0], tuple(size * inner for size in role.cut))
        if self._is_cut_alike(role, inner, length):
            return shard_of(having[0], role.cut)
        outer = self._order[: self._order.index(axis)]
        splits = _splits(role.factor, self._roles, outer)
        sizes = {
            tuple(size * inner for size in chunk_sizes(extent, length))
            for extent in shard_extents(role.factor.size, self._mesh.shape, splits)
        }
        if all(tuple(chunk_sizes(sum(each), length)) == each for each in sizes):
            return Shard(having[0])
        if len(sizes) > 1:
            raise _Infeasible
        return Shard(having[0], sizes.pop())

    def _is_cut_alike(self, role: ShardFactor, inner: int, length: int) -> bool:
        """True if a dim is cut as the outermost factor; raises if blocks cannot be dealt so."""
        alone = len(_splits(role.factor, self._roles, self._order)) == 1
        if not isinstance(role.cut, int):
            return inner == 1
        if not _has_same_blocks(role.factor.size, inner, role.cut * length, alone):
            raise _Infeasible
        return True

    def _without(self, number: int | None, factor: Factor) -> Placement:
        """The placement, along a sharding axis, of an input or output without the factor."""
        mapped = self._mapped
        if number is not None and not (number in mapped.addends and mapped.reduces(factor)):
            return Replicate()
        if factor.reduce_op is None:
            raise _Infeasible
        return Partial(factor.reduce_op)


def _splits(factor: Factor, roles: Sequence[Role], order: Sequence[int]) -> Splits:
    """The splits of a factor by the axes in ``order``."""
    return tuple(
        [
            (axis, role.cut)
            for axis in order
            if isinstance(role := roles[axis], ShardFactor) and role.factor is factor
        ]
    )


def _order(specs: Sequence[DTensorSpec], roles: tuple[Role, ...]) -> Ints:
    """The order in which the axes shard: axes that share a factor are ordered as in an input."""
    sharing: dict[int, list[int]] = {}
    for axis, role in enumerate(roles):
        if isinstance(role, ShardFactor):
            sharing.setdefault(id(role.factor), []).append(axis)
    order = list(range(len(roles)))
    for axes in sharing.values():
        if len(axes) > 1:
            orders = [axes_of(splits) for spec in specs for splits in spec.splits]
            existing = next((each for each in orders if set(each) == set(axes)), tuple(axes))
            for place, axis in zip(axes, existing, strict=True):
                order[place] = axis
    return tuple(order)


def _partial_grads(spec: DTensorSpec, roles: tuple[Role, ...]) -> Ints:
    """The axes along which an input's gradient, computed on each rank, is partial."""
    return tuple(
        axis
        for axis, (role, placement) in enumerate(zip(roles, spec.placements, strict=True))
        if role is not None and isinstance(placement, Replicate) and spec.mesh.spec.shape[axis] > 1
    )


# -- costs -------------------------------------------------------------------------------------


def _redistribution_bytes(source: DTensorSpec, target: DTensorSpec, itemsize: int) -> float:
    """The estimated price in bytes of a redistribution. The steps are planned only later."""
    if source == target:
        return 0.0
    changes = [
        AxisChange(length, old, new)
        for axis, (length, old, new) in enumerate(
            zip(source.mesh.spec.shape, source.placements, target.placements, strict=True)
        )
        if length > 1 and (old != new or _reordered(source, target, axis))
    ]
    return DEFAULT_COST.redistribution_bytes(_local_bytes(source, itemsize), changes)


def _reordered(source: DTensorSpec, target: DTensorSpec, axis: int) -> bool:
    """True if an axis shards the same dim before and afterwards, in another order of axes."""
    placement = source.placements[axis]
    return isinstance(placement, Shard) and source.axes_of(placement.dim) != target.axes_of(
        placement.dim
    )


def _reduction_bytes(out: DTensorSpec, roles: tuple[Role, ...], itemsize: int) -> float:
    """The least price of reducing an output that is partial because a factor is sharded."""
    nbytes = _local_bytes(out, itemsize)
    return sum(
        DEFAULT_COST.reduction_bytes(nbytes, length)
        for length, placement, role in zip(out.mesh.spec.shape, out.placements, roles, strict=True)
        if isinstance(placement, Partial) and isinstance(role, ShardFactor)
    )


def _local_bytes(spec: DTensorSpec, itemsize: int) -> float:
    """The bytes of a local tensor, if shards are even."""
    return spec.nbytes(itemsize) / math.prod(
        length
        for length, placement in zip(spec.mesh.spec.shape, spec.placements, strict=True)
        if isinstance(placement, Shard)
    )
