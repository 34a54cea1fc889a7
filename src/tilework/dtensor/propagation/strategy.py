"""Which factor each axis of the mesh cuts: the choice that moves the fewest bytes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tilework.dtensor.spec import DTensorSpec, Ints, spec_of
from tilework.layout import Partial, Placement, Replicate, Shard, chunk_sizes, offsets_of
from tilework.mesh import DeviceMesh
from tilework.tiled.factors import Dim, DimFactors, Factor, FactorMap, volume


@dataclass(frozen=True)
class Cut:
    """An axis cuts a factor.

    Args:
        factor: Which.
        sizes: How many elements each part has; None: as ``torch.chunk`` cuts.
    """

    factor: Factor
    sizes: Ints | None = None


@dataclass(frozen=True)
class KeepPartial:
    """Along an axis each rank computes one term of a value that is combined later.

    Args:
        inputs: Which inputs are in such terms; the others are the same in all.
        reduce_op: How the terms are combined.
    """

    inputs: frozenset[int]
    reduce_op: str


#: What an axis does in an operator: cuts a factor, keeps terms apart, or nothing: all ranks along
#: it compute the same.
Role = Cut | KeepPartial | None

#: What a message costs at least, in bytes that could be moved meanwhile.
_LATENCY_BYTES = 10_000


@dataclass(frozen=True, eq=False)
class Strategy:
    """How an operator is run on a mesh.

    Args:
        inputs: How each input has to lie.
        outputs: How each output then lies.
        partial_grads: For each input the axes along which its gradient comes out in terms.
        roles: What each axis does.
        order: In which order axes cut.
        cost: Bytes that a rank moves to get the inputs there, and to reduce what is partial then.
    """

    mesh: DeviceMesh
    inputs: tuple[DTensorSpec, ...]
    outputs: tuple[DTensorSpec, ...]
    partial_grads: tuple[Ints, ...]
    roles: tuple[Role, ...]
    order: Ints
    cost: float

    def axes(self, factor: Factor) -> Ints:
        """The axes that cut a factor, in their order."""
        return tuple(
            axis
            for axis in self.order
            if isinstance(role := self.roles[axis], Cut) and role.factor is factor
        )

    def part(self, factor: Factor) -> tuple[int, int]:
        """Where this rank's part of a factor starts, and how large it is."""
        coordinate = self.mesh.get_coordinate()
        offset, size = 0, factor.size
        if coordinate is None:
            return 0, 0
        for axis in self.axes(factor):
            role = self.roles[axis]
            assert isinstance(role, Cut)
            sizes = list(role.sizes or chunk_sizes(size, self.mesh.shape[axis]))
            offset += offsets_of(sizes)[coordinate[axis]]
            size = sizes[coordinate[axis]]
        return offset, size

    @cached_property
    def leaves_empty(self) -> bool:
        """Whether some rank's part of an input has no elements."""
        places = list(itertools.product(*map(range, self.mesh.shape)))
        return any(0 in spec.box_at(place).sizes for spec in set(self.inputs) for place in places)

    def local_size(self, dim: Dim) -> int:
        """How many elements of a dim this rank has."""
        return math.prod([self.part(factor)[1] for factor in dim])


def choose(
    mapped: FactorMap,
    specs: Sequence[DTensorSpec],
    itemsizes: Sequence[int],
    out_shapes: Sequence[Ints] | None = None,
    fixed: Sequence[int] = (),
) -> Strategy | None:
    """The cheapest way to run an operator; None if there is none.

    For each axis the candidates are the factors that inputs are cut along by it now, terms of
    partial inputs where the operator lets them pass, and none. So a result is cut only along what
    some input was cut along. Among choices of equal cost the one that cuts more is taken, then
    that of the earlier input. Every rank finds the same.

    Args:
        mapped: What the operator does.
        specs: How its inputs lie.
        itemsizes: Bytes of an element of each input.
        out_shapes: The outputs' shapes; None: those of their factors.
        fixed: Inputs (their numbers) that have to stay as they lie, and that the first outputs
            are: those that are written in place.
    """
    mesh = specs[0].mesh
    options = [_roles(mapped, specs, axis) for axis in range(mesh.ndim)]
    best: Strategy | None = None
    for roles in itertools.product(*options):
        made = _try(mapped, specs, itemsizes, roles, out_shapes, fixed)
        if made is not None and (best is None or _rank(made) < _rank(best)):
            best = made
    return best


def _rank(choice: Strategy) -> tuple[float, int]:
    return choice.cost, sum(role is None for role in choice.roles)


def _roles(mapped: FactorMap, specs: Sequence[DTensorSpec], axis: int) -> list[Role]:
    """What the axis may do."""
    found: list[Role] = []
    for number, (spec, dims) in enumerate(zip(specs, mapped.inputs, strict=True)):
        placement = spec.placements[axis]
        if isinstance(placement, Shard):
            dim = dims[placement.dim]
            # The outermost factor that runs at all: a part of it is a range of the dim.
            factor = next((one for one in dim if one.size != 1), dim[0] if dim else None)
            if factor is None or factor.whole:
                continue
            sizes = _cut_of(placement, spec, axis, dim, factor)
            for role in (Cut(factor, sizes), Cut(factor)):
                if role not in found:
                    found.append(role)
        elif isinstance(placement, Partial):
            for linear in _sets(mapped, placement.reduce_op):
                apart = KeepPartial(linear, placement.reduce_op)
                if number in linear and apart not in found:
                    found.append(apart)
    return [*found, None]


def _sets(mapped: FactorMap, reduce_op: str) -> Sequence[frozenset[int]]:
    """Inputs that may be in terms together."""
    if mapped.moves:
        return [frozenset(range(len(mapped.inputs)))]
    return mapped.linear if reduce_op in ("sum", "avg") else ()


def _cut_of(
    placement: Shard, spec: DTensorSpec, axis: int, dim: Dim, factor: Factor
) -> Ints | None:
    """Sizes that cut the factor as the placement cuts the dim; None for torch.chunk's."""
    inner = math.prod(one.size for one in dim) // (factor.size or 1)
    sizes = placement.sizes
    if sizes is None and (inner == 1 or len(spec.axes_of(placement.dim)) > 1):
        return None
    if sizes is None:
        sizes = tuple(chunk_sizes(spec.shape[placement.dim], spec.mesh.shape[axis]))
    if inner == 0 or any(size % inner for size in sizes):
        return None
    found = tuple(size // inner for size in sizes)
    return None if list(found) == chunk_sizes(sum(found), len(found)) else found


class _Unfit(Exception):
    """Axes cannot do this."""


def _try(
    mapped: FactorMap,
    specs: Sequence[DTensorSpec],
    itemsizes: Sequence[int],
    roles: tuple[Role, ...],
    out_shapes: Sequence[Ints] | None,
    fixed: Sequence[int],
) -> Strategy | None:
    """What it takes if each axis has its role; None if that does not work."""
    mesh = specs[0].mesh
    order = _order(specs, roles)
    shapes = out_shapes or [tuple(map(volume, dims)) for dims in mapped.outputs]
    try:
        inputs = tuple(
            _lying(mapped, number, dims, spec.shape, mesh, roles, order)
            for number, (dims, spec) in enumerate(zip(mapped.inputs, specs, strict=True))
        )
        outputs = tuple(
            _lying(mapped, None, dims, shape, mesh, roles, order)
            for dims, shape in zip(mapped.outputs, shapes, strict=True)
        )
    except _Unfit:
        return None
    for place, number in enumerate(fixed):
        if inputs[number] != specs[number] or outputs[place] != specs[number]:
            return None
    cost = sum(map(moving, specs, inputs, itemsizes))
    cost += sum(_reducing(out, roles, max(itemsizes)) for out in outputs)
    grads = tuple(_partial_grads(need, roles) for need in inputs)
    return Strategy(mesh, inputs, outputs, grads, roles, order, cost)


def _order(specs: Sequence[DTensorSpec], roles: tuple[Role, ...]) -> Ints:
    """The axes in an order in which those that share a factor cut as they do in an input."""
    order = list(range(len(roles)))
    for axes in _sharing(roles):
        lying = [spec.axes_of(dim) for spec in specs for dim in range(spec.ndim)]
        same = next((found for found in lying if set(found) == set(axes)), tuple(axes))
        for place, axis in zip(axes, same, strict=True):
            order[place] = axis
    return tuple(order)


def _sharing(roles: tuple[Role, ...]) -> list[list[int]]:
    """The axes that cut each factor."""
    found: dict[int, list[int]] = {}
    for axis, role in enumerate(roles):
        if isinstance(role, Cut):
            found.setdefault(id(role.factor), []).append(axis)
    return list(found.values())


def _lying(
    mapped: FactorMap,
    number: int | None,
    dims: DimFactors,
    shape: Ints,
    mesh: DeviceMesh,
    roles: tuple[Role, ...],
    order: Ints,
) -> DTensorSpec:
    """How an input has to lie, or (``number=None``) how an output then lies."""
    placements: list[Placement] = []
    for axis, role in enumerate(roles):
        if isinstance(role, Cut):
            shard = _placement(dims, axis, role, mesh, roles, order)
            placements.append(shard or _lacking(mapped, number, role.factor))
        elif isinstance(role, KeepPartial) and (number is None or number in role.inputs):
            placements.append(Partial(role.reduce_op))
        else:
            placements.append(Replicate())
    try:
        return spec_of(mesh, placements, shape, order)
    except ValueError:  # several reductions at once, or parts that no placement can write
        raise _Unfit from None


def _lacking(mapped: FactorMap, number: int | None, factor: Factor) -> Placement:
    """What cutting a factor does to an input that lacks it, or (``number=None``) an output."""
    if number is not None and not (number in mapped.added and mapped.reduces(factor)):
        return Replicate()
    if factor.reduce_op is None:
        raise _Unfit
    return Partial(factor.reduce_op)


def _placement(
    dims: DimFactors, axis: int, role: Cut, mesh: DeviceMesh, roles: tuple[Role, ...], order: Ints
) -> Shard | None:
    """What cutting a factor does to a tensor with these dims; None if nothing."""
    having = [number for number, dim in enumerate(dims) if role.factor in dim]
    if not having:
        return None
    dim = dims[having[0]]
    at = dim.index(role.factor)
    if len(having) > 1 or any(one.size != 1 for one in dim[:at]):
        raise _Unfit
    inner = volume(dim[at + 1 :])
    if role.sizes is not None:
        return Shard(having[0], tuple(size * inner for size in role.sizes))
    if inner == 1:
        return Shard(having[0])
    length = mesh.shape[axis]
    extents = _extents(axis, role.factor, mesh, roles, order)
    parts = {tuple(size * inner for size in chunk_sizes(extent, length)) for extent in extents}
    if all(tuple(chunk_sizes(sum(part), length)) == part for part in parts):
        return Shard(having[0])
    if len(parts) > 1:
        raise _Unfit
    return Shard(having[0], parts.pop())


def _extents(
    axis: int, factor: Factor, mesh: DeviceMesh, roles: tuple[Role, ...], order: Ints
) -> set[int]:
    """How large the parts of a factor are that an axis cuts further."""
    extents = {factor.size}
    for before in order[: order.index(axis)]:
        role = roles[before]
        if isinstance(role, Cut) and role.factor is factor:
            extents = {
                part
                for extent in extents
                for part in role.sizes or chunk_sizes(extent, mesh.shape[before])
            }
    return extents


def _partial_grads(need: DTensorSpec, roles: tuple[Role, ...]) -> Ints:
    """The axes whose ranks each get another term of an input's gradient."""
    return tuple(
        axis
        for axis, (role, placement) in enumerate(zip(roles, need.placements, strict=True))
        if role is not None and isinstance(placement, Replicate) and need.mesh.shape[axis] > 1
    )


# -- costs -----------------------------------------------------------------------------------


def moving(have: DTensorSpec, need: DTensorSpec, itemsize: int) -> float:
    """About how many bytes each rank moves from one layout to another, and waits for messages.

    It chooses, nothing else: what is then done is planned by ``layout.redistribution_steps``.
    """
    if have == need:
        return 0.0
    lengths = have.mesh.shape
    local = have.nbytes(itemsize) / math.prod(
        length
        for length, placement in zip(lengths, have.placements, strict=True)
        if isinstance(placement, Shard)
    )
    cost = 0.0
    changes = [
        (length, old, new)
        for axis, (length, old, new) in enumerate(
            zip(lengths, have.placements, need.placements, strict=True)
        )
        if length > 1 and (old != new or _reordered(have, need, axis))
    ]
    # In the order in which each is cheapest: what makes tensors smaller first.
    for length, old, new in sorted(changes, key=_urgency):
        share = (length - 1) / length
        match old, new:
            case Replicate(), Shard():
                local /= length
            case Partial(), Shard():
                cost += _LATENCY_BYTES + share * local
                local /= length
            case Shard(), Shard():
                cost += _LATENCY_BYTES + share * local
            case Partial(), _:
                cost += _LATENCY_BYTES + 2 * share * local
            case Shard(), _:
                local *= length
                cost += _LATENCY_BYTES + share * local
    return cost


def _reordered(have: DTensorSpec, need: DTensorSpec, axis: int) -> bool:
    placement = have.placements[axis]
    return isinstance(placement, Shard) and have.axes_of(placement.dim) != need.axes_of(
        placement.dim
    )


def _urgency(change: tuple[int, Placement, Placement]) -> int:
    _, old, new = change
    if isinstance(new, Shard):
        return 0 if isinstance(old, Replicate) else 1
    return 2 if isinstance(old, Partial) else 3


def _reducing(out: DTensorSpec, roles: tuple[Role, ...], itemsize: int) -> float:
    """What it will cost at least to reduce what cutting a factor left in terms."""
    shards = [
        length
        for length, placement in zip(out.mesh.shape, out.placements, strict=True)
        if isinstance(placement, Shard)
    ]
    local = out.nbytes(itemsize) / math.prod(shards)
    return sum(
        (length - 1) / length * local
        for length, placement, role in zip(out.mesh.shape, out.placements, roles, strict=True)
        if isinstance(placement, Partial) and isinstance(role, Cut)
    )
