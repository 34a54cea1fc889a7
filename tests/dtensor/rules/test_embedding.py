"""Look-ups in tables that are cut along features or rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.dtensor.op_checks import check_op, count_op
from tests.tables import each
from tilework.dtensor import Replicate, Shard, distribute_tensor
from tilework.mesh import init_device_mesh
from tilework.testing import run_ranks

FEW: dict[str, Any] = {"meshes": [(2,), (2, 2)], "most": 4, "partial": (), "gathers": False}
ROWS = 7


def table(rows: int = ROWS) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, 4, generator=generator, dtype=torch.float64)


def indices(*shape: int) -> Tensor:
    return torch.randint(0, ROWS, shape, generator=torch.Generator().manual_seed(5))


@each("shape", [(3, 5), (), (0,)])
@each("padding", [None, 2, -1])
def test_embedding(shape: tuple[int, ...], padding: int | None) -> None:
    check_op(
        lambda i, w: F.embedding(i, w, padding),
        *(indices(*shape), table()),
        **FEW,
    )


def test_frequencies_count_over_all_indices() -> None:
    check_op(
        lambda i, w: F.embedding(i, w, scale_grad_by_freq=True),
        *(indices(3, 5), table()),
        **FEW,
    )


def test_rows_are_renormed_in_place() -> None:
    check_op(
        lambda i, w: F.embedding(i, w, max_norm=0.7),
        *(indices(3), table()),
        **FEW,
    )


def test_sparse_gradients_are_dense() -> None:
    def look_up(i: Tensor, w: Tensor) -> Any:
        return F.embedding(i, w, sparse=True)

    def program(rank: int) -> torch.layout:
        mesh = init_device_mesh("cpu", (2,))
        w = distribute_tensor(table(), mesh, [Replicate()]).requires_grad_()
        look_up(distribute_tensor(indices(4), mesh, [Shard(0)]), w).sum().backward()
        assert w.grad is not None
        return w.grad.to_local().layout

    assert run_ranks(2, program) == [torch.strided] * 2


def test_rows_elsewhere_cost_one_reduction() -> None:
    layouts: list[Any] = [[Replicate()], [Shard(0)]]
    seen = count_op(lambda i, w: F.embedding(i, w) * 2, indices(3), table(), layouts=layouts)
    assert seen.forward == seen.backward == []
    assert [str(one) for one in seen.placements[0]] == ["Partial(reduce_op='sum')"]


def test_an_index_that_no_rank_has() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        w = distribute_tensor(table(), mesh, [Shard(0)])
        i = distribute_tensor(torch.tensor([1, ROWS]), mesh, [Replicate()])
        with pytest.raises(IndexError, match="out of range"):
            F.embedding(i, w)

    run_ranks(2, program)


@each("mode", ["sum", "mean", "max"])
@each("padding", [None, 2])
def test_embedding_bag(mode: str, padding: int | None) -> None:
    check_op(
        lambda i, w: F.embedding_bag(i, w, mode=mode, padding_idx=padding),
        *(indices(4, 3), table()),
        **FEW,
    )
    offsets = torch.tensor([0, 3, 3, 7])
    for last in (False, True):
        check_op(
            lambda i, w, o, last=last: F.embedding_bag(
                i, w, o, mode=mode, padding_idx=padding, include_last_offset=last
            ),
            *(indices(7), table(), offsets),
            **FEW,
        )


def test_weighted_bags() -> None:
    weights = torch.arange(12.0, dtype=torch.float64).reshape(4, 3)
    check_op(
        lambda i, w, p: F.embedding_bag(i, w, per_sample_weights=p, mode="sum"),
        *(indices(4, 3), table(), weights),
        **FEW,
    )
    check_op(
        lambda i, w: F.embedding_bag(i, w, max_norm=0.5, mode="sum", scale_grad_by_freq=True),
        *(indices(4, 3), table()),
        **FEW,
    )


def test_one_hot() -> None:
    check_op(lambda i: F.one_hot(i, ROWS), indices(3, 2), **FEW)
    check_op(lambda i: F.one_hot(i), indices(3, 2), **FEW)
