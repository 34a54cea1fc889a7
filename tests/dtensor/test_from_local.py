"""DTensors from the parts that ranks have."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.dtensor.op_checks import Layout, check_op, distributed
from tests.dtensor.sharded_values import full
from tilework.dtensor import (
    DeviceMesh,
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from tilework.testing import run_ranks


def raised_by_all(n: int, program: Callable[[int], Any], kind: type[Exception]) -> str:
    """What each of the ranks raised, in one text."""
    found = run_ranks(n, program, return_exceptions=True)
    assert all(isinstance(one, kind) for one in found), found
    return "\n".join(map(str, found))


LAYOUTS: list[tuple[tuple[int, ...], Sequence[int], Sequence[Placement], Sequence[int] | None]] = [
    ((4,), (4, 3), [Shard(0)], None),
    ((4,), (7, 3), [Shard(0)], None),
    ((4,), (2, 3), [Shard(-2)], None),
    ((4,), (0, 3), [Shard(0)], None),
    ((4,), (9, 3), [Shard(0, sizes=(1, 5, 0, 3))], None),
    ((4,), (3, 5), [Replicate()], None),
    ((4,), (3, 5), [Partial()], None),
    ((2, 2), (7, 5), [Shard(0), Shard(1)], None),
    ((2, 2), (7, 5), [Shard(1), Replicate()], None),
    ((2, 2), (7, 5), [Partial(), Shard(1)], None),
    ((2, 2), (7, 5), [Shard(0), Shard(0)], None),
    ((2, 2), (7, 5), [Shard(0), Shard(0)], [1, 0]),
    ((2, 2), (7, 5), [Shard(0, sizes=(4, 3)), Shard(0)], [0, 1]),
    ((2, 2), (8, 5), [Shard(0), Shard(0, sizes=(3, 1))], None),
    ((2, 2), (6, 5), [Shard(1, sizes=(5, 0)), Shard(0)], None),
]


def test_parts_that_are_uneven_later_are_noticed_by_all() -> None:
    def program(rank: int) -> list[int]:
        mesh = init_device_mesh("cpu", (2,))
        parts = [torch.ones(rows, 3) for rows in (2, 2 + rank, 2)]
        return [DTensor.from_local(part, mesh, [Shard(0)]).shape[0] for part in parts]

    assert run_ranks(2, program) == [[4, 5, 4]] * 2


def test_the_whole_is_found_from_the_parts() -> None:
    """Where no shape is given; where one is, nothing is asked of others."""

    def program(rank: int) -> None:
        shapes: list[tuple[int, ...]] = [(4,), (2, 2)]
        meshes = {shape: init_device_mesh("cpu", shape) for shape in shapes}
        for shape, size, placements, order in LAYOUTS:
            mesh, whole = meshes[shape], torch.randn(*size)
            there = distribute_tensor(whole, mesh, placements, order=order)
            plain = [Shard(p.dim) if isinstance(p, Shard) else p for p in placements]
            for given in (placements, plain):
                found = DTensor.from_local(there.to_local(), mesh, given, order=order)
                assert found.shape == whole.shape, (size, placements)
                assert found.tiling == there.tiling
            told = DTensor.from_local(
                there.to_local(), mesh, placements, shape=size, order=order, run_check=True
            )
            assert told._spec == there._spec

    run_ranks(4, program)


def test_parts_that_are_no_layout_raise_everywhere() -> None:
    def rows(rank: int) -> None:
        DTensor.from_local(torch.ones(2, 3 + rank), init_device_mesh("cpu", (2,)), [Shard(0)])

    def dims(rank: int) -> None:
        DTensor.from_local(torch.ones([2] * (rank + 1)), init_device_mesh("cpu", (2,)), [Shard(0)])

    def corner(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        DTensor.from_local(torch.ones(1 if rank else 3, 2), mesh, [Shard(0), Shard(1)])

    def inner(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        DTensor.from_local(torch.ones((1, 5, 5, 2)[rank]), mesh, [Shard(0), Shard(0)])

    for n, program in ((2, rows), (2, dims), (4, corner), (4, inner)):
        text = raised_by_all(n, program, ValueError)
        assert "on rank 1" in text


def test_ranks_that_differ_raise_everywhere() -> None:
    def of(tensor: Callable[[int], Tensor], placements: Callable[[int], Any]) -> str:
        def program(rank: int) -> None:
            mesh = init_device_mesh("cpu", (2,))
            DTensor.from_local(tensor(rank), mesh, placements(rank))

        return raised_by_all(2, program, ValueError)

    assert "the same dtype" in of(
        lambda rank: torch.ones(2, dtype=[torch.float, torch.half][rank]), lambda _: [Shard(0)]
    )
    assert "the same requires_grad" in of(
        lambda rank: torch.ones(2, requires_grad=rank == 0), lambda _: [Shard(0)]
    )
    assert "the same layout" in of(lambda _: torch.ones(2, 2), lambda rank: [Shard(rank)])
    assert "must have the same length" in of(lambda _: torch.ones(2), lambda _: [Shard(0)] * 2)
    assert "has no dim 1" in of(lambda _: torch.ones(2), lambda _: [Shard(1)])


def test_run_check_compares_values_where_they_are_to_be_the_same() -> None:
    def program(rank: int, differs: bool) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        part = torch.full((2, 3), float(rank // 2 + (rank if differs else 0)))
        DTensor.from_local(part, mesh, [Shard(0), Replicate()], run_check=True)
        DTensor.from_local(part, mesh, [Partial(), Replicate()], run_check=True)

    run_ranks(4, lambda rank: program(rank, False))
    text = raised_by_all(4, lambda rank: program(rank, True), ValueError)
    assert "ranks 0 and 1" in text


def test_a_part_must_be_the_one_that_the_shape_gives_this_rank() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        DTensor.from_local(torch.ones(2), mesh, [Shard(0)], shape=(3,))

    found = run_ranks(2, program, return_exceptions=True)
    assert isinstance(found[1], ValueError)
    assert "has a part of shape [1]" in str(found[1])

    def checked(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        DTensor.from_local(torch.ones(2), mesh, [Shard(0)], shape=(3,), run_check=True)

    assert "rank 1 would have [1]" in raised_by_all(2, checked, ValueError)


def test_what_is_no_part_is_refused() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1,))
        there = distribute_tensor(torch.ones(2), mesh)
        with pytest.raises(TypeError, match="a plain tensor, got DTensor"):
            DTensor.from_local(there, mesh)
        with pytest.raises(TypeError, match="got list"):
            DTensor.from_local([1.0], mesh)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="shape and stride together"):
            DTensor.from_local(torch.ones(2), mesh, stride=(1,))
        with pytest.raises(RuntimeError, match="No device mesh is currently active"):
            DTensor.from_local(torch.ones(2))

    run_ranks(1, program)


def test_gradients_come_back_to_the_parts() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for placement in (Shard(0), Replicate(), Partial()):
            part = torch.full((2, 3), rank + 1.0, requires_grad=True)
            found = DTensor.from_local(part, mesh, [placement])
            assert found.requires_grad
            assert not found.is_leaf
            torch.autograd.backward(found.mul(2).sum())
            assert part.grad is not None
            assert torch.equal(part.grad, torch.full((2, 3), 2.0)), placement

    run_ranks(2, program)


def test_ranks_outside_the_mesh_have_no_part() -> None:
    def program(rank: int) -> Any:
        mesh = DeviceMesh("cpu", [0, 1])
        inferred = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
        assert (inferred.shape, inferred.to_local().numel()) == ((4,), 0 if rank == 2 else 2)
        found = DTensor.from_local(torch.ones(2), mesh, [Shard(0)], shape=(4,))
        return found.shape, found.to_local().numel()

    assert run_ranks(3, program) == [((4,), 2), ((4,), 2), ((4,), 0)]


def test_memory_is_shared() -> None:
    def program(rank: int) -> None:
        part = torch.zeros(2)
        found = DTensor.from_local(part, init_device_mesh("cpu", (2,)), [Shard(0)])
        part.fill_(rank)
        assert found.full_tensor().tolist() == [0, 0, 1, 1]

    run_ranks(2, program)


def test_parts_may_be_of_any_size() -> None:
    """Uneven, explicit, empty, on two axes.

    pytorch#144109, pytorch#161368, pytorch#168134, pytorch#169320.
    """

    def layers(x: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm(F.linear(x, w).relu() + 1, (7,)).cumsum(0)[1:].t()

    def layouts(shape: tuple[int, ...]) -> list[list[Layout]]:
        both = (Shard(0), Shard(0))
        xs = [
            Layout((Shard(0, (0, 5)), Replicate())),
            Layout((Shard(0, (4, 1)), Shard(1, (3, 0)))),
            Layout(both),
            Layout(both, (1, 0)),
            Layout((Shard(1), Shard(0)), None),
        ]
        ws = [Layout((Replicate(), Shard(0, (6, 1)))), Layout(both, (1, 0)), Layout(both)]
        return [[x, w] for x in xs for w in ws]

    x, w = torch.randn(5, 3).double(), torch.randn(7, 3).double()  # rows may be nearly constant
    check_op(layers, x, w, meshes=((2, 2),), layouts=layouts, rtol=1e-4, atol=1e-5)


EVERY_PLACEMENT: list[Placement] = [Replicate(), Shard(0), Shard(1)]


def test_offsets_of_parts_are_where_the_elements_are() -> None:
    """pytorch#161368, pytorch#168134: for each element of each rank, in both orders of axes."""
    whole = torch.arange(35).view(5, 7)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        for placements in itertools.product(EVERY_PLACEMENT, repeat=2):
            for order in (None, (1, 0)):
                x = distributed(whole, mesh, Layout(placements, order))
                box = x._spec.local_box
                assert torch.equal(x.to_local(), whole[box.slices])
                assert torch.equal(full(x), whole)

    run_ranks(4, program)


def test_a_tensor_made_from_a_leaf_may_be_written_to() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x: Any = torch.full((4, 8), 3.0, requires_grad=True)
        y: Any = DTensor.from_local(x, mesh, [Shard(0)]).mul_(2)
        (y * y).sum().backward()
        assert x.is_leaf
        assert y.full_tensor().unique().tolist() == [6.0]
        assert x.grad is not None
        assert x.grad.unique().tolist() == [24.0]  # d(2x)^2 where x was 3

    run_ranks(2, program)


@pytest.mark.parametrize("reduce_op", ["sum", "avg"])
def test_a_part_that_is_a_view_on_one_rank_is_a_leaf_like_others(reduce_op: str) -> None:
    """What is written to a view of a plain tensor is in the history of that tensor."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        part = torch.ones(3)[:2].view(1, 2) if rank else torch.ones(1, 2)
        x: Any = DTensor.from_local(part, mesh, [Partial(reduce_op)]).requires_grad_()
        y = x.expand(2, 1, 2)
        with torch.no_grad():
            x.mul_(2)
        (y * 3).sum().backward()
        assert x.grad.full_tensor().tolist() == [[6.0, 6.0]]
        assert part.tolist() == [[2.0, 2.0]]

    run_ranks(2, program)


def test_the_gradient_of_a_part_lies_as_grad_placements_say() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))

        def gradient(placement: Placement, grad_placement: Placement, **kwargs: Any) -> list[float]:
            x: Any = torch.ones(2, requires_grad=True)
            y: Any = DTensor.from_local(
                x, mesh, [placement], grad_placements=[grad_placement], **kwargs
            )
            (y * torch.arange(1.0, y.numel() + 1)).sum().backward()
            found: list[float] = x.grad.tolist()
            return found

        assert gradient(Replicate(), Replicate()) == [1, 2]
        assert gradient(Replicate(), Partial()) == ([0, 0] if rank else [1, 2])
        assert gradient(Partial(), Replicate()) == [1, 2]
        assert gradient(Shard(0), Shard(0)) == ([3, 4] if rank else [1, 2])
        with pytest.raises(ValueError, match="cannot have the placements"):
            gradient(Shard(0), Replicate())
        with pytest.raises(ValueError, match="its own gradient"):
            gradient(Partial("max"), Partial())

    run_ranks(2, program)
