"""From one layout to another: parts, gradients, and what is communicated for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations, product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tilework.distributed as dist
from tests.dtensor import op_checks
from tests.dtensor.sharded_values import collectives, same
from tests.layout.random_tilings import examples, layouts
from tests.rounding import assert_close
from tests.tables import each
from tilework.comm.functional.async_tensor import AsyncTensor
from tilework.dtensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    init_device_mesh,
    plan_redistribution,
)
from tilework.dtensor.debug.formatting import layout_text
from tilework.dtensor.redistribution.redistribute import plan_steps, redistribute_local
from tilework.dtensor.spec import DTensorSpec, spec_of
from tilework.errors import CollectiveMismatchError, DistError
from tilework.layout import Layout
from tilework.mesh import DeviceMesh
from tilework.testing import run_ranks

Ints = tuple[int, ...]
R, P = Replicate(), Partial()
COMBINE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda terms: terms.sum(0),
    "avg": lambda terms: terms.mean(0),
    "max": lambda terms: terms.amax(0),
    "min": lambda terms: terms.amin(0),
    "product": lambda terms: terms.prod(0),
}


# -- plain tensors, laid out -------------------------------------------------------------------


def terms_of(spec: DTensorSpec, seed: int = 0) -> Tensor:
    """The terms of some whole value, one after the other; one of them if it is not partial."""
    count = math.prod(spec.mesh.shape[axis] for axis in spec.partial_axes)
    generator = torch.Generator().manual_seed(seed)
    if spec.reduce_op in ("min", "max") and len(spec.partial_axes) > 1:
        # Who shares the gradient of an extremum depends on what is reduced together.
        values = torch.randperm(count * math.prod(spec.shape), generator=generator)
        return values.reshape(count, *spec.shape).double()
    # Few values, so that there are zeros, and extrema that several terms have.
    return torch.randint(-2, 4, (count, *spec.shape), generator=generator).double()


def value_of(spec: DTensorSpec, terms: Tensor) -> Tensor:
    return COMBINE[spec.reduce_op or "sum"](terms)


def part_of(spec: DTensorSpec, terms: Tensor) -> Tensor:
    """What this rank holds."""
    place = spec.mesh.get_coordinate()
    if place is None:
        return terms.new_empty(0)
    number = 0
    for axis in spec.partial_axes:
        number = number * spec.mesh.shape[axis] + place[axis]
    return spec.local_part(terms[number]).clone()


def specs_of(mesh: DeviceMesh, shape: Ints, choices: list[list[Placement]]) -> list[DTensorSpec]:
    """Every layout that can be made of these, with axes cutting in every order."""
    found: dict[DTensorSpec, None] = {}
    for placements in product(*choices):
        for order in permutations(range(len(choices))):
            try:
                found[spec_of(mesh, placements, shape, order)] = None
            except ValueError:  # sizes that do not fit, or two reductions
                continue
    return list(found)


def pairs(specs: list[DTensorSpec], some: int = 1) -> Iterator[tuple[DTensorSpec, DTensorSpec]]:
    """All pairs, or each so many-th."""
    for number, pair in enumerate(product(specs, specs)):
        if number % some == 0:
            yield pair


def equal(found: Tensor, expected: Tensor, where: object) -> None:
    assert_close(found, expected, msg=lambda text: f"{where}: {text}")


MESHES: list[tuple[Ints, Ints, list[list[Placement]]]] = [
    ((2,), (5, 4), [[Shard(0), Shard(1), Shard(0, (4, 1)), Shard(1, (0, 4)), R, P]]),
    ((3,), (4, 0, 7), [[Shard(0), Shard(1), Shard(2), Shard(0, (0, 1, 3)), R, Partial("avg")]]),
    ((3,), (), [[R, P, Partial("max"), Partial("product")]]),
    ((2,), (3,), [[R, *map(Partial, COMBINE)]]),
    ((2, 2), (5, 6), [[Shard(0), Shard(1), R, P]] * 2),
    (
        (2, 2),
        (3, 5),
        [[Shard(0, (3, 0)), Shard(1), R, Partial("max")], [Shard(1), R, Partial("max")]],
    ),
    ((2, 3), (7, 3), [[Shard(0), R, Partial("product")], [Shard(0), Shard(1, (1, 0, 2)), R]]),
    ((1, 2), (4, 3), [[Shard(0), R, P, Partial("min")], [Shard(0), Shard(1), R, Partial("min")]]),
]
IDS = [f"{lengths}-{shape}" for lengths, shape, _ in MESHES]


def everywhere(lengths: Ints, program: Callable[[DeviceMesh], Any]) -> list[Any]:
    names = ("dp", "tp", "pp")[: len(lengths)]
    return run_ranks(
        math.prod(lengths),
        lambda rank: program(init_device_mesh("cpu", lengths, mesh_dim_names=names)),
    )


# -- every pair ------------------------------------------------------------------------------


@each(("lengths", "shape", "choices"), MESHES)
def test_pairs_of_layouts(lengths: Ints, shape: Ints, choices: list[list[Placement]]) -> None:
    """Parts, values and gradients: of every pair on one axis, of every third on two."""

    def program(mesh: DeviceMesh) -> None:
        for source, target in pairs(specs_of(mesh, shape, choices), 1 if mesh.ndim == 1 else 3):
            terms = terms_of(source).requires_grad_()
            value = value_of(source, terms)
            weights = torch.arange(1.0, 1 + math.prod(shape)).double().reshape(shape)
            (expected,) = torch.autograd.grad((value * weights).sum(), terms)

            kept = part_of(source, terms.detach())
            local = kept.clone().requires_grad_()
            found = redistribute_local(local, source, target)
            assert found.shape == target.local_shape
            if not target.partial_axes:
                equal(found, part_of(target, value[None]), (source, target))
            whole = redistribute_local(found, target, target.replicated)
            equal(whole, value, (source, target))
            equal(local, kept, "the source is left as it is")
            (grad,) = torch.autograd.grad((whole * weights).sum(), local)
            equal(grad, part_of(source, expected), (source, target))

    everywhere(lengths, program)


@each(("lengths", "shape", "choices"), MESHES)
def test_gradients_of_gradients(lengths: Ints, shape: Ints, choices: list[list[Placement]]) -> None:
    def loss(value: Tensor, weights: Tensor) -> Tensor:
        return (value * value * weights).sum()

    def program(mesh: DeviceMesh) -> None:
        for source, target in pairs(specs_of(mesh, shape, choices), 5):
            weights = torch.arange(1.0, 1 + math.prod(shape)).double().reshape(shape)
            terms = terms_of(source).requires_grad_()
            (first,) = torch.autograd.grad(
                loss(value_of(source, terms), weights), terms, create_graph=True
            )
            # What is computed with a term's gradient, each rank does for itself.
            (expected,) = torch.autograd.grad(loss(first.sum(0), weights), terms)

            local = part_of(source, terms.detach()).requires_grad_()
            there = redistribute_local(local, source, target)
            whole = redistribute_local(there, target, target.replicated)
            (grad,) = torch.autograd.grad(loss(whole, weights), local, create_graph=True)
            terms_too = [P if isinstance(p, Partial) else p for p in source.placements]
            own = spec_of(mesh, terms_too, shape, source.order)
            total = redistribute_local(grad, own, own.replicated)
            (second,) = torch.autograd.grad(loss(total, weights), local)
            equal(second, part_of(source, expected), (source, target))

    everywhere(lengths, program)


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=3)
    .map(tuple)
    .flatmap(
        lambda shape: st.tuples(
            st.just(shape), st.lists(layouts(shape, (2, 2, 2)), min_size=2, max_size=12)
        )
    )
)
@examples(12)
def test_from_layout_to_layout_on_three_axes(task: tuple[Ints, list[Layout]]) -> None:
    shape, found = task

    def program(mesh: DeviceMesh) -> None:
        specs = [spec_of(mesh, one.placements, shape, one.order) for one in found]
        value = torch.arange(1.0, 1 + math.prod(shape)).reshape(shape)
        here, local = specs[0].replicated, value
        for there in specs:
            local, here = redistribute_local(local, here, there), there
            assert local.shape == there.local_shape
            if not there.partial_axes:
                equal(local, part_of(there, value[None]), found)
        equal(redistribute_local(local, here, here.replicated), value, found)

    everywhere((2, 2, 2), program)


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.complex128),
]


@each("dtype", DTYPES)
def test_every_dtype(dtype: torch.dtype) -> None:
    def program(mesh: DeviceMesh) -> None:
        choices: list[Placement] = [Shard(0), Shard(1), R, P]
        for source, target in pairs(specs_of(mesh, (3, 4), [choices, choices]), 13):
            terms = terms_of(source).abs().to(dtype)
            found = redistribute_local(part_of(source, terms), source, target)
            assert found.dtype == dtype
            whole = redistribute_local(found, target, target.replicated)
            expected = terms.any(0) if dtype == torch.bool else terms.sum(0).to(dtype)
            equal(whole, expected, (source, target))

    everywhere((2, 2), program)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_ranks_that_are_processes(backend: str) -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        choices: list[list[Placement]] = [
            [Shard(0), Shard(1), R, P],
            [Shard(0), R, P, Shard(1, (1, 5))],
        ]
        some = 1 if backend == "shm" else 7
        for source, target in pairs(specs_of(mesh, (5, 6), choices), some):
            terms = terms_of(source)
            found = redistribute_local(part_of(source, terms), source, target)
            whole = redistribute_local(found, target, target.replicated)
            equal(whole, value_of(source, terms), (source, target))

    run_ranks(4, program, kind="processes", backend=backend)


def test_memory_of_any_kind() -> None:
    """Transposed, expanded, conjugated and parts of larger tensors."""

    def program(mesh: DeviceMesh) -> None:
        source, shape = spec_of(mesh, [Shard(0)], (4, 6)), (2, 6)
        rank = mesh.get_local_rank()
        whole = torch.randn(4, 6, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))
        mine = source.local_part(whole)
        column = torch.full((1, 1), rank + 1.0, dtype=torch.complex64).expand(shape)
        for local, value in [
            (mine.t().contiguous().t(), whole),
            (mine.conj().resolve_conj().conj(), whole),
            (torch.stack([mine, mine], -1)[..., 0], whole),
            (column, torch.tensor([1.0, 1, 2, 2]).to(torch.complex64)[:, None].expand(4, 6)),
        ]:
            for placement in (R, Shard(1), P):
                target = source.with_placements([placement])
                found = redistribute_local(local, source, target)
                equal(redistribute_local(found, target, target.replicated), value, placement)

    everywhere((2,), program)


# -- what is communicated ----------------------------------------------------------------------


def counted(mesh: DeviceMesh, source: DTensorSpec, target: DTensorSpec) -> list[str]:
    """The collectives of one redistribution, the second time it runs."""
    terms = terms_of(source)
    local = part_of(source, terms)
    redistribute_local(local, source, target)
    groups = {id(group): group for group in [*mesh.get_all_groups(), mesh.axes_group((0, 1))]}
    before = {name: len(group.flight_entries()) for name, group in groups.items()}
    redistribute_local(local, source, target)
    return [
        entry.what.split()[0]
        for name, group in groups.items()
        for entry in group.flight_entries()[before[name] :]
    ]


@each(
    ("source", "target", "expected"),
    [
        ([P, P], [R, R], ["all_reduce"]),
        ([Shard(0), R], [Shard(1), R], ["all_to_all"]),
        ([Shard(0), Shard(0)], [R, R], ["all_gather_into_tensor"]),
        ([Shard(1), Shard(1)], [Shard(0), Shard(0)], ["all_to_all"]),
        ([P, Shard(0)], [R, R], ["all_reduce", "all_gather_into_tensor"]),
        ([P, R], [Shard(0), R], ["reduce_scatter_tensor"]),
        ([R, R], [Shard(0), Shard(1)], []),
        ([R, Shard(0)], [P, Shard(0)], []),
    ],
)
def test_the_collectives_that_everyone_knows(
    source: list[Placement], target: list[Placement], expected: list[str]
) -> None:
    def program(mesh: DeviceMesh) -> list[str]:
        ends = [spec_of(mesh, placements, (8, 8)) for placements in (source, target)]
        return counted(mesh, *ends)

    assert everywhere((2, 2), program) == [expected] * 4


KIND_OF = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all": "all_to_all",
}


def test_what_is_printed_is_what_is_run() -> None:
    def program(mesh: DeviceMesh) -> None:
        choices: list[Placement] = [Shard(0), Shard(1), R, P]
        for source, target in pairs(specs_of(mesh, (5, 6), [choices, choices]), 5):
            steps = plan_redistribution(source, target.placements, target.order).steps
            planned = [step.kind for step in steps if step.kind not in ("slice", "fill")]
            if "plan" not in planned:
                found = counted(mesh, source, target)
                assert sorted(KIND_OF[name] for name in found) == sorted(planned)

    everywhere((2, 2), program)


@each("before", [Shard(0), Partial(), Partial("max"), Replicate()])
@each("dtypes", [(torch.bfloat16, None), (None, torch.bfloat16)])
def test_dtypes_of_a_move_and_of_its_gradient(before: Placement, dtypes: Any) -> None:
    forward, backward = dtypes
    values = torch.tensor([[1.0, 1 + 2**-10, 3.0], [4.0, -5.0, 6.0]], dtype=torch.float32)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        local = (values[rank : rank + 1] if before == Shard(0) else values).clone()
        x = DTensor.from_local(local, mesh, [before]).requires_grad_()
        target = Shard(1) if before == Replicate() else Replicate()
        moved = x.redistribute(placements=[target], forward_dtype=forward, backward_dtype=backward)
        assert moved.dtype == moved.to_local().dtype == (forward or torch.float32)
        cast: Any = x.detach().to(moved.dtype)
        plain = cast.redistribute(placements=[target])
        assert moved.to_local().equal(plain.to_local())
        factor = 1 + 2**-10
        (moved.float() * factor).sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        assert x.grad.dtype == torch.float32
        assert x.grad.full_tensor()[0, 0].item() == torch.tensor(factor).bfloat16().item()

    run_ranks(2, program)


def test_to_another_mesh_is_refused() -> None:
    def program(mesh: DeviceMesh) -> None:
        other = init_device_mesh("cpu", (2,), mesh_dim_names=("other",))
        source, target = (spec_of(one, [R], (4,)) for one in (mesh, other))
        with pytest.raises(ValueError, match="of the same shape on the same mesh"):
            redistribute_local(torch.ones(4), source, target)

    everywhere((2,), program)


def test_what_does_nothing_returns_the_tensor_itself() -> None:
    def program(mesh: DeviceMesh) -> None:
        source = spec_of(mesh, [Shard(0), P], (4, 4))
        x = torch.ones(source.local_shape, requires_grad=True)
        others: list[list[Placement]] = [
            [Shard(0), P],
            [R, R],
            [Shard(1), Partial("max")],
            [Shard(0), Shard(0)],
        ]
        for placements in others:
            assert redistribute_local(x, source, source.with_placements(placements)) is x

    everywhere((1, 1), program)


def test_a_result_shares_no_memory_with_what_it_came_from() -> None:
    def program(mesh: DeviceMesh) -> None:
        for source, target in pairs(specs_of(mesh, (4, 4), [[Shard(0), R, P, Partial("avg")]])):
            x = torch.ones(source.local_shape)
            found = redistribute_local(x, source, target)
            assert found is x or not torch._C._overlaps(found, x)
            assert found.is_contiguous()

    everywhere((2,), program)


def test_a_long_move_goes_on_meanwhile() -> None:
    def program(mesh: DeviceMesh) -> None:
        layouts: list[list[Placement]] = [[Shard(0), R], [P, R], [Shard(0), P]]
        layouts.append([Shard(1), Shard(0)])
        for placements in layouts:
            source = spec_of(mesh, placements, (512, 512))
            terms = terms_of(source)
            local = part_of(source, terms).requires_grad_()
            found = redistribute_local(local, source, source.replicated, async_op=True)
            assert isinstance(found, AsyncTensor)
            with torch.no_grad():
                local.zero_()
            equal(found + 0, value_of(source, terms), placements)
            (grad,) = torch.autograd.grad(found.sum(), local)
            assert (grad == 1).all()
        small = spec_of(mesh, [Shard(0), R], (4,))
        x = torch.ones(small.local_shape)
        assert type(redistribute_local(x, small, small.replicated, async_op=True)) is Tensor

    everywhere((2, 2), program)


# -- ranks elsewhere -----------------------------------------------------------------------------


def test_ranks_outside_the_mesh_keep_what_they_have() -> None:
    def program(rank: int) -> None:
        mesh = DeviceMesh("cpu", [2, 0])
        source = spec_of(mesh, [Shard(0)], (4,))
        local = torch.arange(4.0)[source.local_box.slices] if rank != 1 else torch.empty(0)
        found = redistribute_local(local, source, source.replicated)
        if rank == 1:
            assert found is local
        else:
            assert found.tolist() == [0, 1, 2, 3]

    run_ranks(3, program)


def test_ranks_in_another_order_than_the_axes() -> None:
    def program(rank: int) -> None:
        mesh = DeviceMesh("cpu", [[3, 1], [0, 2]])
        choices: list[Placement] = [Shard(0), Shard(1), R, P]
        for source, target in pairs(specs_of(mesh, (5, 6), [choices, choices]), 3):
            terms = terms_of(source)
            found = redistribute_local(part_of(source, terms), source, target)
            whole = redistribute_local(found, target, target.replicated)
            equal(whole, value_of(source, terms), (source, target))

    run_ranks(4, program)


def test_meta_tensors_move_nothing() -> None:
    def program(mesh: DeviceMesh) -> None:
        source = spec_of(mesh, [Shard(0)], (4, 3))
        found = redistribute_local(torch.empty(2, 3, device="meta"), source, source.replicated)
        assert found.is_meta
        assert found.shape == (4, 3)

    everywhere((2,), program)


# -- what is wrong -------------------------------------------------------------------------------


@each(
    ("ours", "theirs"),
    [
        ((Shard(0), R), (Shard(0), Shard(1))),
        ((Shard(0), R), (Shard(1), R)),  # the same bytes, in another order
        ((Shard(0), Shard(1)), (Shard(1), Shard(0))),
        ((P, R), (Partial("max"), R)),
        ((P, R), (P, Shard(0))),
    ],
)
def test_a_rank_that_moves_something_else_fails_on_all(
    ours: tuple[Placement, Placement], theirs: tuple[Placement, Placement]
) -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        source, target = (spec_of(mesh, [one], (4, 4)) for one in (theirs if rank else ours))
        with pytest.raises(CollectiveMismatchError, match="ranks called different things") as e:
            redistribute_local(torch.ones(source.local_shape), source, target)
        for ends in (ours, theirs):
            before, after = (
                layout_text(spec_of(mesh, [end], (4, 4)), torch.float32) for end in ends
            )
            assert f"{before} to {after}" in str(e.value)

    run_ranks(2, program)


def test_what_is_wrong_on_one_rank_raises_on_all() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        source = spec_of(mesh, [Shard(0)], (4, 4))
        wrong = ValueError if rank else DistError
        with pytest.raises(wrong, match=r"has shape \[2, 4\], got a tensor of shape \[3, 4\]"):
            redistribute_local(torch.ones(2 + rank, 4), source, source.replicated)

    run_ranks(2, program)


def test_what_has_no_identity_element_raises_on_all() -> None:
    def program(rank: int) -> None:
        x = DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (2,)), [Replicate()])
        with pytest.raises(NotImplementedError, match="PREMUL_SUM has no identity element"):
            x.redistribute(placements=[Partial("premul_sum")])

    run_ranks(2, program)


def test_a_part_of_another_shape_is_refused() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        source = spec_of(mesh, [Shard(0)], (4, 6))
        with pytest.raises(ValueError, match=r"has shape \[2, 6\], got a tensor of shape \[4, 6\]"):
            redistribute_local(torch.ones(4, 6), source, source.replicated)
        other = spec_of(mesh, [R], (4, 5))
        with pytest.raises(ValueError, match="two layouts of the same shape"):
            redistribute_local(torch.ones(2, 6), source, other)

    run_ranks(2, program)


def test_a_lost_rank_is_an_error_not_a_hang() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        source = spec_of(mesh, [Shard(0)], (4, 6))
        if rank == 1:
            raise KeyError("gone")
        with pytest.raises(DistError):
            redistribute_local(torch.ones(2, 6), source, source.replicated)

    results = run_ranks(2, program, return_exceptions=True)
    assert results[0] is None
    assert isinstance(results[1], KeyError)


def test_a_plan_is_printed_before_it_runs() -> None:
    def program(mesh: DeviceMesh) -> str:
        source = spec_of(mesh, [P, Shard(0)], (8, 8))
        count = dist.get_default_group().get_sequence_number_for_group()
        text = str(plan_redistribution(source, [R, Shard(1)], dtype=torch.float16))
        assert dist.get_default_group().get_sequence_number_for_group() == count
        return text

    (text,) = set(everywhere((2, 2), program))
    assert "from dp=P(sum) tp=S0 to dp=R tp=S1: 2 steps, 96 bytes per rank" in text


def kinds(x: DTensor, placements: Sequence[Placement], dtype: torch.dtype | None = None) -> Any:
    """The steps of a redistribution, with those that communicate nothing left out."""
    steps = plan_redistribution(x, placements, dtype=dtype).steps
    return [step.kind for step in steps if step.kind not in ("slice", "fill")]


def test_redistribution_takes_no_needless_way() -> None:
    """What is planned is what is run.

    autoparallel#462, pytorch#132751, pytorch#167106, pytorch#171913.
    """

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        whole = torch.arange(512.0 * 256).view(512, 256)
        tried: list[tuple[list[Placement], list[Placement], list[str] | None]] = [
            # From shard to shard: not through replicate.
            ([Replicate(), Shard(0)], [Replicate(), Shard(1)], ["all_to_all"]),
            ([Shard(0), Replicate()], [Shard(1), Replicate()], ["all_to_all"]),
            ([Shard(0), Shard(0)], [Shard(1), Shard(1)], ["all_to_all"]),
            ([Shard(0), Shard(1)], [Shard(1), Shard(0)], ["plan"]),
            # Reductions that follow each other are one.
            ([Partial(), Partial()], [Replicate(), Replicate()], ["all_reduce"]),
            ([Partial(), Partial()], [Shard(0), Shard(0)], ["reduce_scatter"]),
            # What is to be cut anyway is cut first.
            ([Shard(0), Replicate()], [Replicate(), Shard(1)], None),
            ([Replicate(), Replicate()], [Shard(0), Shard(1)], []),
        ]
        for source, target, wanted in tried:
            x = op_checks.distributed(whole, mesh, op_checks.Layout(tuple(source)))
            found = kinds(x, target)
            assert wanted is None or found == wanted, (source, target, found)
            assert "all_gather" not in found or len(found) == 1, (source, target, found)
            x.redistribute(placements=target)  # agreed on
            with collectives() as called:
                same(x.redistribute(placements=target), whole)
            moved = [name for name in called if name != "all_gather_object"]
            assert len(moved) >= len(found)

    run_ranks(4, program)


def test_steps_are_planned_once_for_all_ranks_and_meshes_of_a_process() -> None:
    def program(rank: int) -> object:
        mesh = init_device_mesh("cpu", (2,))
        cut, whole = (spec_of(mesh, [each], (97, 3)) for each in (Shard(0), Replicate()))
        dist.barrier()
        found = []
        for turn in range(2):
            if turn == rank:
                found.append(plan_steps(cut, whole, torch.float32))
            dist.barrier()
        wider = plan_steps(cut, whole, torch.float64)
        assert wider.nbytes == 2 * found[0].nbytes
        return found[0]

    first, second = run_ranks(2, program)
    assert first is second
    assert run_ranks(2, program) == [first, first]
