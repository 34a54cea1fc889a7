"""Memory is shared where torch shares it, and copied where torch copies, in every layout."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import tilework.distributed as dist
from tests.dtensor.op_checks import Layout, distributed
from tests.fuzz import programs
from tests.rounding import assert_close
from tests.tables import each
from tilework.dtensor import DTensor, distribute_tensor
from tilework.layout import Placement, Replicate, Shard
from tilework.mesh import init_device_mesh
from tilework.testing import run_ranks

#: Makes a tensor plain, or a DTensor: the same values and strides.
Make = Callable[[Tensor], Tensor]


def check(program: Callable[[Make], Sequence[Any]], ndim: int = 2) -> None:
    """Compare what a program gives with DTensors, in all layouts, with what it gives without."""
    expected = program(torch.clone)
    for mesh in ((1,), (2,), (2, 2)):
        ways: list[Placement] = [Replicate(), *map(Shard, range(ndim))]
        for placements in itertools.product(ways, repeat=len(mesh)):
            _check_in(program, mesh, placements, expected)


def _check_in(
    program: Callable[[Make], Sequence[Any]],
    shape: tuple[int, ...],
    placements: tuple[Placement, ...],
    expected: Sequence[Any],
) -> None:
    def on_rank(rank: int) -> list[Any]:
        mesh = init_device_mesh("cpu", shape)
        results = program(lambda t: distributed(t, mesh, Layout(placements)))
        return [_full(x.detach()) if isinstance(x, DTensor) else x for x in results]

    try:
        outcome = run_ranks(math.prod(shape), on_rank)
    except RuntimeError as error:
        if programs.REFUSED.search(f"{error}") and set(placements) != {Replicate()}:
            return  # by name, on all ranks
        raise
    for rank, results in enumerate(outcome):
        for number, (got, want) in enumerate(zip(results, expected, strict=True)):
            where = f"result {number} on rank {rank} of {shape}, {list(placements)}"
            if isinstance(want, Tensor):
                assert_close(got, want.detach(), msg=lambda text: f"{where}: {text}")  # noqa: B023
            else:
                assert got == want, where


def _full(tensor: Any) -> Any:
    return tensor.full_tensor()


BOX = torch.arange(24.0).view(2, 3, 4)
SQUARE = torch.arange(16.0).view(4, 4)


@each("name", ["contiguous", "ravel", "flatten", "clone"])
def test_what_is_not_contiguous_is_copied(name: str) -> None:
    def program(make: Make) -> list[Any]:
        base = make(BOX)
        copied = getattr(base.transpose(0, 1), name)()
        copied.zero_()
        shared = base.transpose(0, 1).transpose(0, 1).ravel()
        shared[3] = 7
        return [base, copied, copied.stride(), base.reshape(-1), base.contiguous() is base]

    check(program, 3)


def test_views_are_of_the_memory_not_of_the_shape_that_the_base_has_then() -> None:
    def program(make: Make) -> list[Any]:
        x = make(SQUARE)
        last, column = x[-1], x[:, 1]
        x.t_()
        x.add_(1)
        x.unsqueeze_(1)
        last.mul_(2)
        x.squeeze_()
        x.swapaxes_(0, 1)
        x[2, 1] = 9
        return [x, last, column, x.stride(), x.is_contiguous()]

    check(program)


def test_writes_through_views_are_not_lost() -> None:
    def program(make: Make) -> list[Any]:
        x = make(SQUARE)
        torch._foreach_mul_([x[2], x[2]], 2.0)
        torch._foreach_zero_([x[1, 1:]])
        torch.mul(x[0], 2, out=x[1])
        torch._foreach_copy_([x[3]], [x[0]])
        torch.max(x * 1, 0, out=(x[0], torch.zeros_like(x[0], dtype=torch.long)))
        weight = make(SQUARE).requires_grad_()
        weight[0].data.fill_(2)
        weight.data[1].fill_(3)
        weight.detach()[2].uniform_(5, 5)
        return [x, weight]

    check(program)


def moved(*rest: str) -> dict[str, Any]:
    """What a program gives on a square that is sharded by rows, of which ``row`` is the second."""
    mesh = init_device_mesh("cpu", (2,))
    names: dict[str, Any] = {"torch": torch, "DTensor": DTensor}
    names["x"] = distribute_tensor(SQUARE.clone(), mesh, [Shard(0)])
    names["row"] = names["x"][1]
    for text in rest:
        exec(text, names)
    return names


@each(
    "write",
    [
        *("x.add_(1)", "x[3] = 1", "x.data.add_(1)", "x.t().mul_(2)", "x.detach().zero_()"),
        *("x[0].add_(1)", "x.to_local().add_(1)", "x.data.to_local().add_(1)"),
        *("with torch.inference_mode(): x.mul_(2)", "torch._foreach_mul_([x], 2.0)"),
        *("x.uniform_()", "x.data = x * 2", "x.unsqueeze_(0)", "torch.mul(x, 2, out=x)"),
        *("row.to_local().add_(1)", "row.data.to_local().add_(1)"),
        *("local = x.data.to_local()\nrow = x[1]\nlocal.add_(1)",),
    ],
)
@each(
    "use", ["row * 1", "row.add_(1)", "row.t()", "row.detach()", "row.full_tensor()", "x[0] + row"]
)
def test_a_view_that_moved_is_not_used_after_another_write(write: str, use: str) -> None:
    def on_rank(rank: int) -> None:
        names = moved(write)
        assert " = " not in repr(names["row"])
        with pytest.raises(RuntimeError, match=r"is a view that had to move elements of DTensor"):
            exec(use, names)
        exec("seen = x[..., -1] * 1", names)

    run_ranks(2, on_rank)


@each("name", ["x[3] = 1", "x.mul_(2)", "x.uniform_()", "x.data.t().zero_()"])
def test_the_error_says_what_was_viewed_and_what_wrote(name: str) -> None:
    def on_rank(rank: int) -> str:
        with pytest.raises(RuntimeError, match="make the view again") as error:
            moved(name, "row * 1")
        return str(error.value)

    (said, *_) = run_ranks(2, on_rank)
    assert "view that had to move elements of DTensor f32[4@0, 4]" in said
    assert any(
        f"written to since ({by})" in said for by in ("mul_", "fill_", "a random fill", "zero_")
    )


def test_writes_through_a_view_that_moved_go_to_the_base_and_to_all_that_share_the_copy() -> None:
    def on_rank(rank: int) -> None:
        names = moved(
            "alias, data, part = row.view_as(row), row.data, row[1:]",
            "row.mul_(2)\nalias[0] = 50\ndata.add_(1)\npart.add_(1)",
        )
        expected = SQUARE.clone()
        expected[1] *= 2
        expected[1, 0] = 50
        expected[1] += 1
        expected[1, 1:] += 1
        assert names["x"].full_tensor().equal(expected)
        assert names["row"].full_tensor().equal(expected[1])
        assert names["data"].full_tensor().equal(expected[1])

    run_ranks(2, on_rank)


def test_a_recorded_write_through_a_view_that_moved_is_in_the_graph() -> None:
    def program(make: Make) -> list[Any]:
        leaf, other = make(SQUARE).requires_grad_(), make(SQUARE * 2).requires_grad_()
        x = leaf * 1
        row = x[1]
        row.mul_(3)
        row[1:].add_(other[2, 1:])
        x[2] += row
        (x[1] * x[2]).sum().backward()  # type: ignore[no-untyped-call]
        return [x, leaf.grad, other.grad]

    check(program)


@each("use", ["alias * 1", "alias.mul_(2)"])
def test_what_shares_a_copy_that_was_made_again_is_out_of_date(use: str) -> None:
    def on_rank(rank: int) -> None:
        names = moved("x = x.requires_grad_() * 1\nrow = x[1]\nalias = row[1:]", "row.mul_(2)")
        exec("y = row * 1", names)
        with pytest.raises(RuntimeError, match="make the view again"):
            exec(use, names)

    run_ranks(2, on_rank)


def test_a_write_to_a_detached_view_is_not_in_the_base_s_graph() -> None:
    def program(make: Make) -> list[Any]:
        leaf = make(torch.arange(15.0).view(5, 3)).requires_grad_()
        x = leaf * 1
        with torch.no_grad():
            view = x[4:].detach()
        view.fill_(0.3)
        x[1].detach().mul_(2)
        x.sum().backward()  # type: ignore[no-untyped-call]
        return [leaf.grad, x, view]

    check(program)


@pytest.mark.parametrize("place", [Shard(0), Shard(1), Replicate()])
@pytest.mark.parametrize(
    "view", [lambda x: x.view(torch.int32), lambda x: torch.view_as_real(torch.complex(x, x))]
)
def test_memory_as_another_dtype(view: Callable[[Tensor], Tensor], place: Placement) -> None:
    def program(rank: int) -> None:
        plain = torch.arange(16.0).reshape(4, 4)
        x = distribute_tensor(plain, init_device_mesh("cpu", (3,)), [place])
        assert torch.equal(view(x)[1:].full_tensor(), view(plain)[1:])  # type: ignore[attr-defined]

    run_ranks(3, program)


def test_hooks_stay_on_views_when_data_is_written() -> None:
    def program(d: Make) -> Sequence[Any]:
        seen: list[Any] = []
        x = d(SQUARE).requires_grad_()
        view = x[1]
        view.register_hook(lambda grad: seen.append(_plain(grad)))  # type: ignore[no-untyped-call]
        view.data.add_(1)
        (view * 2).sum().backward()  # type: ignore[no-untyped-call]
        return [view, x, x.grad, *seen]

    check(program)


def test_set_and_data_share_memory() -> None:
    def program(d: Make) -> Sequence[Any]:
        x, y, z = d(SQUARE), d(SQUARE * 2), d(SQUARE * 3)
        old = x[1:]
        x.set_(y)  # type: ignore[call-overload]
        rows = x[2:]
        y[2].mul_(5)
        z.data = y
        x.add_(1)
        last = z[3:, 1:]
        z[3].zero_()
        y.set_(y[1:3].t())  # type: ignore[call-overload]
        y.sub_(1)
        return [old, rows, x, y, z, last]

    check(program)


#: Values for ``x.data = value``, in memory of their own.
NEW_DATA: list[Callable[[Any], Any]] = [
    lambda x: x.data - 1,
    lambda x: x - 1,
    lambda x: (x.data - 1).view(16).view(4, 4),
    lambda x: (x.data - 1).clamp_(0, 9),
]


@each("new", NEW_DATA)
def test_memory_that_a_tensor_has_left_is_freed(new: Callable[[Any], Any]) -> None:
    def program(rank: int) -> list[bool]:
        x: Any = distribute_tensor(SQUARE, init_device_mesh("cpu", (2,)), [Shard(0)])
        dist.barrier()  # a rank that is still within the distribution may hold this rank's memory
        x.requires_grad_()
        memory: list[Any] = []
        weak: Any = StorageWeakRef
        for _ in range(4):
            memory.append(weak(x._local_tensor.untyped_storage()))
            column = x.data[:, 0]
            x.data = new(x)
            column.add_(1)
        return [each.expired() for each in memory]

    assert run_ranks(2, program) == [[True, True, True, False]] * 2


def test_shallow_copies_share_memory() -> None:
    def program(make: Make) -> list[Any]:
        x = make(BOX[0]).requires_grad_()
        rows = x.detach()[1:]
        copied, turned, parameter = map(copy.copy, (x, x.t(), torch.nn.Parameter(x[:1])))
        copied.data.add_(100)
        parameter.data.mul_(2)
        turned.detach().reshape(-1).zero_()  # a copy
        (copied * copied).sum().backward()  # type: ignore[no-untyped-call]
        kinds = [isinstance(parameter, torch.nn.Parameter), copied.requires_grad, turned.is_leaf]
        return [x, rows, copied.grad, x.grad is None, turned, turned.stride(), parameter, *kinds]

    check(program)


def test_an_equation_that_sums_nothing_gives_a_view() -> None:
    def program(make: Make) -> list[Any]:
        leaf = make(torch.arange(36.0).view(3, 2, 2, 3)).requires_grad_()
        x = leaf * 1
        torch.einsum("abbc->cab", x).mul_(2)
        torch.einsum("a...a->...a", x)[0].add_(1)
        torch.einsum(x, [0, 1, 1, 0], [1, 0]).mul_(3)
        (x * x).sum().backward()  # type: ignore[no-untyped-call]
        return [x, leaf.grad]

    check(program, 4)


def test_what_set_does_not_take() -> None:
    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x: Any = distributed(SQUARE.clone(), mesh, Layout((Shard(0),)))
        for args in ((), (SQUARE,), (SQUARE.untyped_storage(),), (x, 0, (2, 2), (2, 1))):
            with pytest.raises(TypeError, match="takes another DTensor"):
                x.set_(*args)
        with pytest.raises(RuntimeError, match="convert it first"):
            x.set_(x.double())
        with pytest.raises(RuntimeError, match="in-place operation"):
            x.clone().requires_grad_().set_(x)

    run_ranks(2, on_rank)


def _plain(tensor: Any) -> Any:
    return _full(tensor) if isinstance(tensor, DTensor) else tensor


@each(
    "program",
    [
        # A view stays in the graph of a leaf whose dims change in place.
        # What a rule has written in place is not written again: strides of such dims may differ.
        "v0 = leaf('v0', (2, 3, 4), 36, 'R')\nv1 = v0[1:2:2]\n"
        "with torch.no_grad(): v1[v1 > 0.3] *= 0.25",
        # In torch a write in the graph enters what its view shows, also after dims have changed.
        "v1 = leaf('v1', (), 43, 'P')\nv2 = data((1, 6), 12, 'S0')\nv6 = v2.diagonal(0, -1, 0)\n"
        "v6.unsqueeze_(0)\nv6.div_(v1.abs() + 1)\nv7 = v2 * 1",
    ],
)
def test_copied_views_that_were_lost_once(program: str) -> None:
    programs.compare(program)


def test_a_view_is_given_no_data_but_its_own() -> None:
    def program(d: Make) -> Sequence[Any]:
        x = d(SQUARE).requires_grad_()
        y = x * 2
        row, of_leaf = y[1], x[1]
        if isinstance(row, DTensor):
            with pytest.raises(RuntimeError, match="cannot be given other data"):
                row.data = d(SQUARE)[2]
        of_leaf.data = of_leaf.data
        for refused in (row.detach_, of_leaf.detach_, of_leaf.zero_, of_leaf[:].t_):
            with pytest.raises(RuntimeError):
                refused()
        (row.sum() + of_leaf.sum() + y.sum()).backward()  # type: ignore[no-untyped-call]
        return [row, of_leaf, y, x.grad]

    check(program)


@each("how", [lambda x: x.mul_(3), lambda x: x[1:].mul_(3), lambda x: torch._foreach_add_([x], 1)])
def test_a_write_to_a_copied_view_with_a_hook_is_refused(how: Callable[[Any], Any]) -> None:
    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x: Any = distributed(SQUARE, mesh, Layout((Shard(0),))).requires_grad_() * 2
        row = x[0]
        row.register_hook(lambda grad: grad * 2).remove()
        row.mul_(2)
        row.register_hook(lambda grad: grad * 2)
        before = row.full_tensor()
        with pytest.raises(RuntimeError, match="had to move elements, and has a hook"):
            how(row)
        assert row.full_tensor().equal(before)
        x.mul_(2)

    run_ranks(2, on_rank)
