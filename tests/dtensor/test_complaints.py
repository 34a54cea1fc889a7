"""What users of sharded tensors have complained of: values and gradients that were wrong."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilework.distributed.functional as functional
from tests.dtensor.op_checks import (
    Layout,
    check_op,
    distributed,
)
from tests.dtensor.sharded_values import cut, full, same
from tilework.dtensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    init_device_mesh,
    local_map,
)
from tilework.mesh import DeviceMesh
from tilework.testing import run_ranks

GRID = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
EVERY: list[Placement] = [Replicate(), Shard(0), Shard(1)]


def terms(whole: Tensor, mesh: DeviceMesh, op: str = "sum") -> DTensor:
    """A copy of a tensor in terms along all axes of a mesh."""
    return distributed(whole, mesh, Layout((Partial(op),) * mesh.ndim))


# -- wrong results that nobody was told of ---------------------------------------------------


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "product"])
def test_a_number_is_added_to_a_partial_value_once(op: str) -> None:
    """pt#163193: and not once on each rank; the other operators with a number likewise."""

    def numbers(x: Tensor) -> list[Tensor]:
        return [
            x + 1,
            1 - x,
            x - 2.5,
            x * 3,
            x / 2,
            x.add(1, alpha=2),
            x.pow(2),
            -x,
            torch.rsub(x, 1),
        ]

    check_op(numbers, GRID.abs() + 1, partial=(op,), meshes=((2,),), rtol=1e-5, atol=1e-5)


def test_a_number_is_added_in_place_once() -> None:
    """pt#163193, as people write it."""

    def program(rank: int) -> None:
        x = terms(GRID, init_device_mesh("cpu", (2,)))
        x += 1  # type: ignore[misc]
        same(x, GRID + 1)
        x.sub_(1).mul_(2)
        same(x, GRID * 2)

    run_ranks(2, program)


def test_nonlinear_operators_see_the_value_and_not_its_terms() -> None:
    """pt#165962, pt#159856: extrema, norms and bounds of a partial value."""

    def nonlinear(x: Tensor) -> list[Tensor]:
        largest, where = x.max(dim=1)
        return [
            *(x.max(), x.min(), x.amax(0), x.amin(1), largest, where, x.argmax(), x.argmin(0)),
            *(x.norm(), x.norm(p=1, dim=0), torch.linalg.vector_norm(x, 3), x.std(), x.var(0)),
            *(x.clip(-0.5, 0.5), x.clamp(min=0), x.clamp_max(0.1), x.relu(), x.abs(), x.exp()),
            *(x.softmax(1), x.sign(), x.round(), x > 0, x.topk(2).values, x.sort(0).values),
            *(x * x, x.prod(), x.logsumexp(0), x.cumsum(0), x.median(), x.count_nonzero()),
        ]

    check_op(nonlinear, GRID, grads=False, partial=("sum", "max"), most=6, rtol=1e-5, atol=1e-5)


def test_norms_of_gradients_are_clipped_as_of_plain_ones() -> None:
    """pt#159856: ``clip_grad_norm_`` where gradients lie in any way."""

    def clipped(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
        params = [one.detach().clone().requires_grad_() for one in (w, b)]
        F.linear(x, *params).square().sum().backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(params, 1.0)
        return [norm.detach(), *[one.grad for one in params if one.grad is not None]]

    w, b = torch.randn(3, 6), torch.randn(3)
    check_op(clipped, GRID, w, b, grads=False, most=12, meshes=((2,), (2, 2)), rtol=1e-5, atol=1e-5)


def test_item_of_a_partial_value_is_the_value() -> None:
    """pt#167213: with all that makes a number of a tensor."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        x = terms(torch.tensor(3.5), mesh)
        assert x.item() == float(x) == x.tolist() == 3.5  # type: ignore[comparison-overlap]
        assert int(x) == 3
        assert bool(x)
        assert f"{x:.1f}" == "3.5"
        assert round(float(x), 1) == 3.5
        assert cut(GRID, mesh, [Shard(0), Shard(1)]).sum().item() == pytest.approx(GRID.sum())
        assert [0, 1, 2, 3][terms(torch.tensor(2), mesh)] == 2

    run_ranks(4, program)


def test_matrices_whose_dims_are_cut_in_unlike_orders_multiply() -> None:
    """pt#166598."""
    orders: Sequence[tuple[int, int] | None] = (None, (1, 0))

    def layouts(shape: tuple[int, ...]) -> list[list[Layout]]:
        dims = itertools.product((0, 1), orders, (0, 1), orders)
        return [
            [Layout((Shard(a),) * 2, first), Layout((Shard(b),) * 2, second)]
            for a, first, b, second in dims
        ]

    x, y = torch.randn(6, 5), torch.randn(5, 6)
    check_op(torch.mm, x, y, meshes=((2, 2),), layouts=layouts, rtol=1e-4, atol=1e-5)


def test_index_put_writes_where_torch_does() -> None:
    """pt#172350."""

    def put(x: Tensor, rows: Tensor, columns: Tensor, values: Tensor) -> list[Tensor]:
        made = x.clone()
        made[rows, columns] = values
        other = x.index_put((rows,), values[:, None], accumulate=True)
        added = x.clone().index_put_((rows, columns), values, accumulate=True)
        return [made, other, added]

    rows, columns = torch.tensor([0, 3, 1]), torch.tensor([5, 0, 2])
    check_op(put, GRID, rows, columns, torch.randn(3), most=16)


def test_indices_of_extrema_count_in_the_whole_tensor() -> None:
    """pt#175776: and not in this rank's part; the first of equals as on one rank."""

    def indices(x: Tensor) -> list[Tensor]:
        found = [[x.max(d), x.min(d, keepdim=True), x.topk(2, d), x.sort(d)] for d in (0, 1)]
        indices = [one.indices for along in found for one in along]  # type: ignore[attr-defined]
        return [*indices, x.argmax(0), x.argmin(1), x.argmax(), x.argsort(1), x.kthvalue(2)[1]]

    ties = torch.tensor([[1.0, 7, 7, 2, 0, 7], [5, 5, 1, 9, 9, 0], [7, 7, 7, 9, 0, 7]])
    check_op(lambda x: [x.max(0).indices, x.max(1).indices, x.argmax()], ties, grads=False, most=12)
    check_op(indices, GRID, grads=False, meshes=((2,), (2, 2)), most=12)


def test_what_was_flattened_splits_again() -> None:
    """pt#179509: views that split merged dims, with gradients."""

    def views(x: Tensor) -> list[Tensor]:
        flat = x.flatten()
        return [
            *(flat.view(6, 4), flat.view(2, 2, 6), flat.view(4, 2, 3), flat.unflatten(0, (3, 8))),  # type: ignore[no-untyped-call]
            *(x.view(2, 12), x.reshape(8, 3).t(), x.view(2, 2, 6).flatten(1), x.view(-1, 1, 2)),
            x.view(2, 2, 3, 2).permute(2, 0, 3, 1).flatten(2).flatten(0, 1).view(3, 2, 4),
        ]

    check_op(views, GRID, meshes=((2,), (2, 2)), most=16)


def test_gradients_through_a_dim_that_is_cut_twice_and_unflattened() -> None:
    """pt#186282: two axes of the mesh on the parts of one dim."""

    def heads(x: Tensor, w: Tensor) -> Tensor:
        split = (x @ w).unflatten(1, (4, 2))  # type: ignore[no-untyped-call]
        return torch.einsum("bhd,bhe->hde", split, split.softmax(2)).flatten(0, 1)

    def layouts(shape: tuple[int, ...]) -> list[list[Layout]]:
        both = [Layout((Shard(1), Shard(1)), order) for order in (None, (1, 0))]
        rows = Layout((Shard(0), Shard(0)))
        return [[x, w] for x in (rows, Layout((Replicate(), Shard(1)))) for w in (*both, rows)]

    check_op(heads, torch.randn(4, 6), torch.randn(6, 8), meshes=((2, 2),), layouts=layouts)


def test_slices_are_initialised_in_place() -> None:
    """pt#139735: ``weight[index].zero_()`` and its like reach the tensor."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        for placements in itertools.product(EVERY, repeat=2):
            plain, x = GRID.clone(), cut(GRID, mesh, placements)
            for one in (plain, x):
                one[1].zero_()
                one[2:, 3].fill_(7)
                one[-1, 1:4] += 1
                one[:, 0] = torch.arange(4.0)
                nn.init.constant_(one[0, 4:], 5)
                one.narrow(0, 1, 2).mul_(2)
            same(x, plain)
        embedding = nn.Embedding(5, 4, padding_idx=2)
        embedding.weight = nn.Parameter(cut(embedding.weight, mesh, [Shard(0), Shard(1)]))
        embedding.reset_parameters()
        assert not full(embedding.weight)[2].any()
        assert full(embedding.weight)[3].all()

    run_ranks(4, program)


# -- gradients -------------------------------------------------------------------------------


def test_gradients_survive_a_trip_through_local_tensors() -> None:
    """pt#172932: ``from_local(x.to_local())`` changes nothing, in whatever layout."""

    def trip(x: Tensor) -> Tensor:
        if not isinstance(x, DTensor):
            return (x * 2).sin()
        spec = (x * 2)._spec  # type: ignore[attr-defined]
        there = (x * 2).to_local()  # type: ignore[attr-defined]
        back = DTensor.from_local(
            there, spec.mesh, spec.placements, shape=spec.shape, order=spec.order
        )
        return back.sin()

    check_op(trip, GRID, partial=("sum", "avg"))


def test_a_gradient_in_terms_can_be_said_to_be_so() -> None:
    """torchtitan#1805: each rank's loss is of its own part, and the weight is replicated."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        plain = GRID.t().clone().requires_grad_()
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
        (plain @ x).square().sum().backward()  # type: ignore[no-untyped-call]
        weight = cut(GRID.t(), mesh, [Replicate()]).requires_grad_()
        mine = cut(x, mesh, [Shard(1)]).to_local()
        (weight.to_local(grad_placements=[Partial()]) @ mine).square().sum().backward()
        same(weight.grad, plain.grad)

    run_ranks(2, program)


def test_gradients_of_mapped_functions_are_those_of_plain_ones() -> None:
    """autoparallel#515."""
    x, w = torch.randn(4, 6), torch.randn(6, 4)
    plain = [one.clone().requires_grad_() for one in (x, w)]
    (plain[0] @ plain[1]).sin().sum().backward()  # type: ignore[no-untyped-call]

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for left, right, out in (
            (Shard(0), Replicate(), Shard(0)),
            (Replicate(), Shard(1), Shard(1)),
            (Shard(1), Shard(0), Partial()),
            (Replicate(), Replicate(), Replicate()),
        ):
            a, b = (cut(one, mesh, [how]) for one, how in ((x, left), (w, right)))
            a.requires_grad_(), b.requires_grad_()
            product = local_map(torch.mm, [out], ([left], [right]))
            product(a, b).sin().sum().backward()
            same(a.grad, plain[0].grad)
            same(b.grad, plain[1].grad)

    run_ranks(2, program)


def test_gradients_of_collectives_are_the_adjoints() -> None:
    """pt#153016, pt#58005: the sum of all ranks' losses, differentiated by each rank's input."""
    xs = [torch.randn(4, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]

    def derivative(program: Callable[[list[Tensor]], Tensor]) -> list[Tensor]:
        leaves = [one.clone().requires_grad_() for one in xs]
        return list(torch.autograd.grad(program(leaves), leaves))

    rows = torch.randn(2, 8)
    total = derivative(lambda x: (x[0] + x[1]).sin() @ rows[:, :4].sum(0))
    gathered = derivative(lambda x: torch.cat(x).sin() @ rows.sum(0))
    scattered = derivative(lambda x: (x[0] + x[1]).sin() @ rows[0, :4])
    swapped = derivative(lambda x: torch.cat([*x[0].split(2), *x[1].split(2)]).sin() @ rows[0])  # type: ignore[no-untyped-call]

    def program(rank: int) -> None:
        def grad(fn: Callable[[Tensor], Tensor]) -> Tensor:
            x = xs[rank].clone().requires_grad_()
            return torch.autograd.grad(fn(x), x)[0]

        close = torch.testing.assert_close
        close(grad(lambda x: functional.all_reduce(x).sin() @ rows[rank, :4]), total[rank])
        whole = grad(lambda x: functional.all_gather_tensor(x, 0).sin() @ rows[rank])
        close(whole, gathered[rank])
        mine = rows[0, :4].split(2)[rank]  # type: ignore[no-untyped-call]
        close(
            grad(lambda x: functional.reduce_scatter_tensor(x, "sum", 0).sin() @ mine),
            scattered[rank],
        )
        other = torch.cat([part.split(2)[rank] for part in rows[0].split(4)])  # type: ignore[no-untyped-call]
        close(grad(lambda x: functional.all_to_all_single(x).sin() @ other), swapped[rank])

    run_ranks(2, program)
