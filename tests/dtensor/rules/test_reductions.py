"""Reductions, extrema, statistics, norms, softmax, sorting: over whole and cut dims."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.dtensor.op_checks import check_op, count_op, torch_computes
from tests.dtensor.rules.test_elementwise import check, together
from tests.tables import each
from tilework.dtensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from tilework.testing import run_ranks

vector_norm: Callable[..., Tensor] = torch.linalg.vector_norm
matrix_norm: Callable[..., Tensor] = torch.linalg.matrix_norm

A = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
#: With equal elements, zeros among them.
TIES = torch.tensor([[1, 0, 2], [0, 0, 2], [1, 0, 2], [0, 0, 1]], dtype=torch.float64)
CUBE = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def over_dims(function: Callable[..., Any]) -> Callable[..., Any]:
    """Over all dims, one, several, none; with and without them left."""
    return together(
        function,
        lambda x: function(x, 0),
        lambda x: function(x, dim=-1, keepdim=True),
        lambda x: function(x, dim=(0, 1)),
        lambda x: function(x, dim=(1, 0), keepdim=True),
        lambda x: function(x, dim=[-1]),
    )


@each("shape", [A.shape, (2, 1, 3), (0, 3)])
def test_sums(shape: Sequence[int]) -> None:
    names = ("sum", "nansum", "mean", "nanmean")
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    check(
        together(*[over_dims(getattr(torch, name)) for name in names]),
        tensor,
    )


def trace(x: Tensor) -> Tensor:
    """The trace; of the square part only, where torch's gradient of a tall one is wrong.

    Up to torch 2.6 at least it goes on below the square, to every (columns + 1)-th element.
    """
    return torch.trace(x if _TALL_TRACES else x[: x.shape[1]])


def _trace_grad(x: Tensor) -> Tensor:
    return torch.autograd.grad(torch.trace(x), x)[0]


_TALL_TRACES = _trace_grad(torch.ones(5, 3, requires_grad=True)).count_nonzero() == 3


def test_sums_of_other_kinds() -> None:
    check(
        together(
            lambda x: x.sum(0, dtype=torch.float32),
            lambda x: x.sum(axis=1, keepdims=True),
            lambda x: (x > 0).sum(),
            lambda x: x.long().mean(1, dtype=torch.float64),
            *(torch.prod, lambda x: torch.prod(x, 0), lambda x: x.prod(1, keepdim=True)),
            *(trace, lambda x: torch.trace(x.T), lambda x: torch.trace((4 * x).long())),
        ),
        A,
    )
    check(over_dims(torch.all), TIES > 0)
    check(over_dims(torch.any), TIES)
    check(together(torch.count_nonzero, lambda x: x.count_nonzero(0)), TIES)


def test_a_product_with_zeros_has_gradients() -> None:
    check(together(torch.prod, lambda x: x.prod(0)), TIES)


def test_a_mean_of_half_precision_does_not_overflow() -> None:
    tensor = torch.full((6, 3), 40_000.0).half()
    check(together(torch.mean, lambda x: x.mean(0)), tensor, partial=())


@pytest.mark.parametrize("name", ["max", "min"])
def test_extrema_share_gradients_as_plain_torch(name: str) -> None:
    one = getattr(torch, name)
    check(
        together(
            *(over_dims(getattr(torch, f"a{name}")), one),
            *(lambda x: one(x, 0), lambda x: one(x, dim=1, keepdim=True)),
            *(lambda x: torch.aminmax(x), lambda x: torch.aminmax(x, dim=0, keepdim=True)),
            *(lambda x: one(x.long(), 0), lambda x: one(x > 0, 1), lambda x: one(x > 0)),
        ),
        TIES,
    )


def test_where_extrema_are() -> None:
    check(
        together(
            *(torch.argmax, torch.argmin, lambda x: x.argmax(keepdim=True)),
            *(lambda x: x.argmax(0), lambda x: x.argmin(1, keepdim=True)),
            lambda x: x.long().argmax(0),
        ),
        TIES,
    )


def test_extrema_of_nan() -> None:
    nan = torch.tensor([[1, math.nan, 0], [2, 2, 0], [2, math.nan, -math.inf]])
    check(
        together(
            *(torch.amax, lambda x: x.amax(0), torch.max, lambda x: x.max(0), torch.argmax),
            *(lambda x: x.min(1), lambda x: x.argmin(0)),
        ),
        nan,
        partial=(),
    )


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@each("tensor", [A, A[:1], TIES])
def test_spread(tensor: Tensor) -> None:
    check(
        together(
            over_dims(torch.var),
            *(torch.std, lambda x: x.std(0, keepdim=True), lambda x: x.var(False)),
            *(lambda x: x.var(0, correction=0), lambda x: x.var(1, False, True)),
            *(lambda x: torch.var_mean(x, 0), lambda x: torch.std_mean(x, (0, 1), keepdim=True)),
        ),
        tensor,
    )


def test_spread_of_complex_and_of_low_precision() -> None:
    check(lambda x: torch.var(x, 0), torch.complex(A, A + 1))
    check(
        together(lambda x: x.var(0), lambda x: x.std()),
        A.bfloat16(),
        partial=(),
        rtol=2e-2,
        atol=2e-2,
    )


def test_norms_of_vectors() -> None:
    orders = (2, 1, 0, 0.5, 3, math.inf, -math.inf)
    check(
        together(
            *[lambda x, order=order: vector_norm(x, order, 0) for order in orders],
            *[lambda x, order=order: vector_norm(x, order, keepdim=True) for order in orders],
            *(torch.norm, lambda x: x.norm(3, (0, 1), True), lambda x: x.norm(dim=1)),
            *(lambda x: torch.linalg.norm(x), lambda x: torch.linalg.norm(x, dim=0)),
            lambda x: vector_norm(x.float(), dtype=torch.float64),
        ),
        TIES,
        partial=(),
    )
    check(
        together(lambda x: vector_norm(x, -1, 0), lambda x: vector_norm(x, -2)),
        TIES,
        partial=(),
    )
    check(lambda x: vector_norm(x, -1, 0), A)
    check(lambda x: vector_norm(x, 2, 0), torch.complex(A, A + 1))


def test_norms_of_matrices() -> None:
    orders = ("fro", "nuc", 1, -1, 2, -2, math.inf, -math.inf)
    check(
        together(
            *[lambda x, order=order: matrix_norm(x, order) for order in orders],
            *[lambda x, order=order: torch.linalg.norm(x, order, (0, 1), True) for order in orders],
        ),
        CUBE,
    )


@each("shape", [(0, 0), (0, 3), (3, 0)])
def test_norms_of_matrices_without_elements(shape: tuple[int, int]) -> None:
    x = torch.zeros(shape)
    for order in ("fro", 1, math.inf):
        # torch 2.6 has none where there is nothing to take the maximum of.
        if torch_computes(lambda order=order: matrix_norm(x, order)):  # type: ignore[misc]
            check(lambda x, order=order: matrix_norm(x, order), x, grads=False)


def test_distances() -> None:
    check(
        together(
            *(torch.dist, F.pairwise_distance, lambda x, y: torch.dist(x, y, 1)),
            *(F.cosine_similarity, lambda x, y: F.cosine_similarity(x, y, 0)),
            *(lambda x, y: F.normalize(x * y, dim=0), lambda x, y: (x * y).renorm_(2, 0, 1.0)),
        ),
        *(A, A.flip(0) + 0.25),
    )


def test_likeness_of_what_is_broadcast() -> None:
    x, y = A[None], A[:2, None] + 0.5
    check(together(F.cosine_similarity, lambda x, y: F.cosine_similarity(x, y, dim=0)), *(x, y))


@pytest.mark.parametrize("dim", [0, -1])
def test_softmax(dim: int) -> None:
    check(
        together(
            *(
                lambda x: F.softmax(x, dim),
                lambda x: x.log_softmax(dim),
                lambda x: F.softmin(x, dim),
            ),
            *(lambda x: torch.softmax(x.float(), dim, torch.float64),),
            *(lambda x: x.logsumexp(dim), lambda x: torch.logsumexp(x, (0, 1), keepdim=True)),
        ),
        *(A * 100,),
    )
    rows = torch.tensor([[-math.inf, math.inf, 1], [-math.inf, 2, 3], [-math.inf, 0, 1]])
    check(lambda x: torch.logsumexp(x, dim), rows, partial=())
    check(
        lambda x: F.softmax(x, dim),
        A.bfloat16(),
        partial=(),
        rtol=2e-2,
        atol=2e-2,
    )


@pytest.mark.parametrize("dim", [0, 1])
def test_rows_along_a_dim(dim: int) -> None:
    check(
        together(
            *[
                lambda x, name=name: getattr(torch, name)(x, dim=dim)
                for name in (
                    *("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "sort", "argsort"),
                    *("diff", "median", "nanmedian", "mode"),
                )
            ],
            *(lambda x: torch.topk(x, 2, dim), lambda x: torch.kthvalue(x, 2, dim, True)),
            *(lambda x: x.sort(stable=True, dim=dim, descending=True), torch.msort),
            *(lambda x: torch.trapezoid(x, dim=dim), lambda x: x.quantile(0.3, dim, True)),
            lambda x: torch.cumulative_trapezoid(x, dx=0.5, dim=dim),
            *(lambda x: (x * 1).cumsum_(dim), lambda x: (x * 1).cumprod_(dim)),
            *(lambda x: x.long().cumsum(dim), lambda x: torch.gradient(x, dim=dim)),
        ),
        A,
    )


@each("name", ["quantile", "nanquantile"])
@each("level", [1.5, torch.tensor([0.5, 1.5])])
def test_levels_are_looked_at_by_ranks_without_a_part(name: str, level: Any) -> None:
    def program(rank: int) -> None:
        x = distribute_tensor(torch.ones(1, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
        with pytest.raises(RuntimeError, match="must be in the range"):
            getattr(torch, name)(x, level, dim=1)

    run_ranks(2, program)


def test_extrema_of_no_complex_numbers() -> None:
    """Of which torch takes none that has elements."""
    check_op(lambda x: torch.amin(x, 1), torch.zeros(0, 3, dtype=torch.complex128), grads=False)


@pytest.mark.parametrize("name", ["cummax", "cummin"])
def test_gradients_of_greatest_so_far_require_none_where_there_are_none(name: str) -> None:
    """torch gives the input itself as the gradient of an empty part."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.rand(2, 1), mesh, [Shard(1)]).requires_grad_()
        (grad,) = torch.autograd.grad(getattr(x, name)(0).values.sum(), x)
        assert not grad.requires_grad

    run_ranks(2, program)


def test_rows_with_other_tensors() -> None:
    check(
        together(
            *(lambda x, q: x.quantile(q, 0), lambda x, q: x.nanquantile(q, 1, keepdim=True)),
            lambda x, q: torch.trapezoid(x, torch.cat([q, q.sum()[None]]), dim=1),
            *(lambda x, q: torch.diff(x, prepend=x), lambda x, q: torch.trapezoid(x, x + 1)),
            *(lambda x, q: torch.bucketize(x, q), lambda x, q: torch.searchsorted(q, x)),
            lambda x, q: torch.searchsorted(x.sort(1)[0], x),
        ),
        *(A, torch.tensor([0.1, 0.7], dtype=torch.float64)),
    )


def test_counts() -> None:
    numbers, weights = torch.tensor([3, 1, 5, 1, 0, 3, 3]), torch.rand(7, dtype=torch.float64)
    check(together(torch.bincount, lambda x: torch.bincount(x, minlength=9)), numbers)
    check(torch.bincount, numbers, weights, partial=())
    check(
        together(lambda x: x.histc(4), lambda x: x.histc(4, 0, 3)),
        TIES,
        partial=(),
    )


def test_one_answer() -> None:
    check(
        together(
            *(torch.equal, torch.allclose, lambda x, y: torch.equal(x, y[:2])),
            *(lambda x, y: torch.allclose(x, y + 1e-9), lambda x, y: torch.equal(x, y + 1)),
            *(lambda x, y: x.sum().item() > 0, lambda x, y: bool((x == y).all())),
            *(
                lambda x, y: int(x.max()),
                lambda x, y: float(x[0, 0]),
                lambda x, y: x.max().is_nonzero(),
            ),
        ),
        *(TIES, TIES.clone()),
        grads=False,
        partial=(),
    )


@each("tensor", [TIES, TIES.to(torch.uint8), torch.zeros(0, 1, 3), CUBE[0, 0, 0]])
def test_one_answer_for_each_element(tensor: Tensor) -> None:
    """() stands for no dims here, unlike in other reductions."""
    check(
        together(
            lambda x: x.any(()),
            lambda x: torch.any(x, dim=(), keepdim=True),
            lambda x: x.all([]),
            lambda x: torch.all(x, dim=(), keepdim=True),
            lambda x: (torch._is_all_true(x > 0), torch._is_any_true(x > 0)),
        ),
        tensor,
    )


def test_several_elements_are_no_number() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        tensor = distribute_tensor(A, mesh, [Shard(0)])
        with pytest.raises(RuntimeError, match="15 elements cannot be converted to Scalar"):
            tensor.item()
        with pytest.raises(RuntimeError, match="ambiguous"):
            bool(tensor)
        with pytest.raises(IndexError, match="Dimension out of range"):
            tensor.sum(2)

    run_ranks(2, program)


def test_the_rest_stays_cut() -> None:
    seen = count_op(
        together(
            *(
                lambda x: x.sum(1),
                lambda x: x.max(1)[0],
                lambda x: x.var(1),
                lambda x: x.sort(1)[0],
            ),
            *(lambda x: x.softmax(1), lambda x: x.norm(dim=1), lambda x: x.argmax(1)),
        ),
        A,
        layouts=[[Shard(0)]],
    )
    assert seen.forward == seen.backward == []
    assert set(seen.placements) == {(Shard(0),)}


@each(
    ("function", "count"),
    [
        (lambda x: x.sum(0), 0),
        (lambda x: x.mean(0), 0),
        (lambda x: x.var(0), 1),
        (lambda x: x.std(0), 2),
        (lambda x: torch.var_mean(x, 0), 1),
        (lambda x: x.detach().amax(0), 0),
        (lambda x: x.amax(0), 2),
        (lambda x: x.max(0), 2),
        (lambda x: x.argmax(0), 2),
        (lambda x: x.softmax(0), 2),
        (lambda x: x.log_softmax(0), 2),
        (lambda x: x.logsumexp(0), 2),
        (lambda x: x.norm(dim=0), 1),
        (lambda x: x.cumsum(0), 1),
        (lambda x: x.cumprod(0), 1),
    ],
)
def test_few_small_reductions(function: Callable[..., Any], count: int) -> None:
    seen = count_op(function, A, layouts=[[Shard(0)]])
    assert seen.forward == ["all_reduce"] * count
    assert len(seen.backward) <= 2


def test_sums_pass_through_what_is_linear() -> None:
    seen = count_op(
        together(lambda x: x.sum(0), torch.mean, lambda x: x.cumsum(0), trace, torch.diff),
        A,
        layouts=[[Partial()]],
    )
    assert seen.forward == []
    assert set(seen.placements) == {(Partial(),)}
    seen = count_op(lambda x: x.amax(1), A, layouts=[[Replicate()]])
    assert seen.forward == []


GRID = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


def test_indices_of_extrema_count_in_the_whole_tensor() -> None:
    """pytorch#175776: and not in this rank's part; the first of equals as on one rank."""

    def indices(x: Tensor) -> list[Tensor]:
        found = [[x.max(d), x.min(d, keepdim=True), x.topk(2, d), x.sort(d)] for d in (0, 1)]
        indices = [one.indices for along in found for one in along]  # type: ignore[attr-defined]
        return [*indices, x.argmax(0), x.argmin(1), x.argmax(), x.argsort(1), x.kthvalue(2)[1]]

    ties = torch.tensor([[1.0, 7, 7, 2, 0, 7], [5, 5, 1, 9, 9, 0], [7, 7, 7, 9, 0, 7]])
    check_op(lambda x: [x.max(0).indices, x.max(1).indices, x.argmax()], ties, grads=False, most=12)
    check_op(indices, GRID, grads=False, meshes=((2,), (2, 2)), most=12)


def test_renorm_of_a_vector_is_refused() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
        with pytest.raises(RuntimeError, match="at least 2"):
            x.renorm_(2, 0, 1.0)

    run_ranks(2, program)
