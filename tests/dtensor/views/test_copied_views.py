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

    for rank, results in enumerate(run_ranks(math.prod(shape), on_rank)):
        for number, (got, want) in enumerate(zip(results, expected, strict=True)):
            where = f"result {number} on rank {rank} of {shape}, {list(placements)}"
            if isinstance(want, Tensor):
                assert_close(got, want.detach(), msg=lambda text: f"{where}: {text}")  # noqa: B023
            else:
                assert got == want, where


def _full(tensor: Any) -> Any:
    return tensor.full_tensor()


def part(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


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


def test_gradients_go_through_views_of_what_became_a_view() -> None:
    def program(make: Make) -> list[Any]:
        leaf = make(SQUARE).requires_grad_()
        x = leaf * 1
        last = x[-1]
        x.as_strided_((4, 4), (1, 4))
        x.mul_(3)
        last.mul_(2)
        ((last * last).sum() + x.sin().sum()).backward()  # type: ignore[no-untyped-call]
        return [x, last, leaf.grad]

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


def test_writes_that_torch_does_not_count_are_seen() -> None:
    def program(make: Make) -> list[Any]:
        x = make(SQUARE)
        row = x[1]
        x.data.add_(1)
        seen = row * 1
        with torch.inference_mode():
            x.mul_(2)
        row.data.add_(1)
        return [x, row, seen]

    check(program)


def test_local_tensors_of_views_may_be_written_to() -> None:
    def program(make: Make) -> list[Any]:
        x = make(SQUARE)
        if isinstance(x, DTensor):
            x = x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)
        part(x[0]).add_(1)
        held = part(x[1])
        first = x * 1
        x[1] = 5
        held.mul_(2)
        return [first, x[0], x]

    def sharded(make: Make) -> list[Any]:
        x = make(SQUARE)
        row = x[2]  # replicated where its dim was sharded
        if isinstance(row, DTensor) and not row._spec.is_replicated:
            x[2] += 1
        else:
            part(row).add_(1)
        return [x * 1, x]

    check(program)
    check(sharded)


def test_local_tensors_see_what_is_written_through_other_views() -> None:
    def program(make: Make) -> list[Any]:
        x = make(SQUARE)
        other, kept = x.detach(), torch.nn.Parameter(x[0])
        row, held = x[1], part(kept.detach())  # which counts the parameter's writes as its own
        seen = part(row)
        other.add_(100)
        same = torch.equal(seen, part(row * 1)) and torch.equal(held, part(kept.detach() * 1))
        return [kept, x, row, same]

    check(program)


def test_local_tensors_of_expanded_views_see_writes() -> None:
    def program(make: Make) -> list[Any]:
        x = make(SQUARE)
        views = [x[:1].expand(3, 4), x[0].expand(3, 4), x[:, 1:2].expand(-1, 2)]
        held = [view.to_local() if isinstance(view, DTensor) else view for view in views]
        x.add_(3)
        x.data.mul_(2)
        seen = [
            view.to_local() if isinstance(view, DTensor) else view
            for view in (v * 1 for v in views)
        ]
        return [x, *views, *map(torch.equal, held, seen)]

    check(program)


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


def test_as_strided_reads_and_writes_the_memory_of_the_base() -> None:
    def program(make: Make) -> list[Any]:
        x = make(SQUARE)
        y = x.t()[1:]
        z = y.as_strided((3, 2), (1, 5), 2)
        every = x[:, ::2].as_strided((4,), (1,))
        z.mul_(10)
        y.as_strided((2,), (3,)).add_(0.5)
        return [x, y, z, every, y.storage_offset(), y.stride(), every.stride()]

    check(program)


@pytest.mark.parametrize("place", [Shard(0), Shard(1), Replicate()])
@pytest.mark.parametrize(
    "view", [lambda x: x.view(torch.int32), lambda x: torch.view_as_real(torch.complex(x, x))]
)
def test_memory_as_another_dtype(view: Callable[[Tensor], Tensor], place: Placement) -> None:
    def program(rank: int) -> None:
        plain = torch.arange(16.0).reshape(4, 4)
        x = distribute_tensor(plain, init_device_mesh("cpu", (3,)), [place])
        for size, stride, offset in [((2, 2), (1, 2), 3), ((4, 4), (4, 1), 0), ((8, 2), (2, 1), 0)]:
            expected = view(plain).as_strided(size, stride, offset)
            actual = view(x).as_strided(size, stride, offset).full_tensor()  # type: ignore[attr-defined]
            assert actual.dtype == expected.dtype
            assert torch.equal(actual, expected)
        shown = view(plain), view(x)
        for tensor in shown:
            windows = tensor.unfold(0, 2, 1)
            windows[windows > 3] = 7
        assert torch.equal(shown[0], shown[1].full_tensor())  # type: ignore[attr-defined]
        assert torch.equal(plain, x.full_tensor())

    run_ranks(3, program)


def test_gradients_of_as_strided() -> None:
    def program(make: Make) -> list[Any]:
        leaf = make(SQUARE).requires_grad_()
        x = (leaf * 2).t()
        z = x.as_strided((3, 3), (1, 2), 1)
        (z * z).sum().backward()  # type: ignore[no-untyped-call]
        return [z, leaf.grad]

    check(program)


def test_hooks_stay_on_views_when_data_is_written() -> None:
    def program(d: Make) -> Sequence[Any]:
        seen: list[Any] = []
        x = d(SQUARE).requires_grad_()
        view = x[1]
        view.register_hook(lambda grad: seen.append(_plain(grad)))  # type: ignore[no-untyped-call]
        x[0].data.mul_(3)
        x[1].data.add_(1)
        (view * 2).sum().backward()  # type: ignore[no-untyped-call]
        return [view, x, x.grad, *seen]

    check(program)


def test_set_and_data_share_memory() -> None:
    def program(d: Make) -> Sequence[Any]:
        x, y, z = d(SQUARE), d(SQUARE * 2), d(SQUARE * 3)
        old = x[1]
        x.set_(y)  # type: ignore[call-overload]
        row = x[2]
        y[2].mul_(5)
        z.data = y
        x.add_(1)
        last = z[3, 1:]
        z[3].zero_()
        y.set_(y[1:3].t())  # type: ignore[call-overload]
        y.sub_(1)
        return [old, row, x, y, z, last]

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
        row = x.detach()[1]
        copied, turned, parameter = map(copy.copy, (x, x.t(), torch.nn.Parameter(x[0])))
        copied.data.add_(100)
        parameter.data.mul_(2)
        turned.detach().reshape(-1).zero_()  # a copy
        (copied * copied).sum().backward()  # type: ignore[no-untyped-call]
        kinds = [isinstance(parameter, torch.nn.Parameter), copied.requires_grad, turned.is_leaf]
        return [x, row, copied.grad, x.grad is None, turned, turned.stride(), parameter, *kinds]

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


def test_a_view_of_what_requires_a_gradient_since_has_none_of_its_own() -> None:
    def program(make: Make) -> list[Any]:
        x, left = make(SQUARE), make(SQUARE)
        row, other = x[1], left[1]
        x.requires_grad_()
        (row * 2).sum().backward()  # type: ignore[no-untyped-call]
        before = [row.requires_grad, row.is_leaf, row.grad, x.grad]
        with torch.no_grad():
            row.mul_(2)
        (row * row).sum().backward()  # type: ignore[no-untyped-call]
        left.requires_grad_()
        other * 2
        left.requires_grad_(False)
        other.add_(1)
        return [*before, x, row, row.is_leaf, x.grad, left, other.requires_grad]

    check(program)


def test_a_view_of_a_leaf_that_is_a_view_leaves_its_graph_with_a_write() -> None:
    def program(make: Make) -> list[Any]:
        x = make(SQUARE)
        turned = x.t().requires_grad_()
        row = turned[1]
        with torch.no_grad():
            x.mul_(2)
        (row * row).sum().backward()  # type: ignore[no-untyped-call]
        return [turned.grad, row, row.requires_grad]

    check(program)


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
        # A view of a view that one rank copies by itself.
        "v0 = leaf('v0', (1, 6), 65, 'S1')\nv1 = v0.expand([2, 2, 6])\nv2 = v1[..., 0]\n"
        "v3 = v2.view_as(v2)\nv4 = v3.mT\nv4.data.view(-1)[0] += 1",
        # A view stays in the graph of a leaf whose dims change in place.
        # What a rule has written in place is not written again: strides of such dims may differ.
        "v0 = leaf('v0', (2, 3, 4), 36, 'R')\nv1 = v0[1:2:2]\n"
        "with torch.no_grad(): v1[v1 > 0.3] *= 0.25",
        # The base has left the graph, and is then written to through another view.
        "v0 = leaf('v0', (7, 2), 94, 'S1')\nwatch(v0, 'v0')\nv1 = v0 * 2\nv2 = v0.reshape(-1)\n"
        "v0.requires_grad_(False)\nwith torch.no_grad(): v3 = v2[-9]\nv3.zero_()",
        "v0 = leaf('v0', (7, 2), 94, 'S1')\nwatch(v0, 'v0')\nv1 = v0 * 2\nv2 = v0.reshape(-1)\n"
        "v0.requires_grad_(False)\nv2.detach().mul_(2.0)",
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


@each("layout", ["R R", "S0 S0", "S0 R"])
def test_a_local_write_to_a_view_that_shows_elements_several_times(layout: str) -> None:
    program = (
        f"v1 = leaf('v1', (3,), 37, '{layout}')\nv2 = v1.unfold(0, 1, 2).expand([2, 3])\n"
        "write_local(v2[:, :].data, 0.0)"
    )
    programs.compare(program, (2, 3))


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
        with pytest.raises(RuntimeError, match="is a view whose gradient has a hook"):
            how(row)
        assert row.full_tensor().equal(before)
        x.mul_(2)

    run_ranks(2, on_rank)


@each("seen", [lambda x: x.register_hook(lambda grad: grad), lambda x: x.retain_grad()])
def test_a_leaf_is_not_frozen_where_a_rank_would_lose_what_sees_a_gradient(
    seen: Callable[[Any], Any],
) -> None:
    def on_rank(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x: Any = distributed(SQUARE, mesh, Layout((Shard(0),))).requires_grad_()
        half = x[: x.shape[0] // 2]
        seen(half)
        with pytest.raises(RuntimeError, match=r"requires_grad_\(False\) of"):
            x.requires_grad_(False)
        assert x.requires_grad

    run_ranks(2, on_rank)
