"""What torch refuses: on all ranks, also without elements, and before any communicates."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.dtensor.op_checks import noting_gatherings
from tests.dtensor.sharded_values import cut
from tests.tables import each, pairs
from tilework.dtensor import (
    Partial,
    Placement,
    Shard,
    distribute_tensor,
    explain,
    init_device_mesh,
    register_rule,
    strict,
)
from tilework.dtensor.base import forget_handler
from tilework.testing import run_ranks
from tilework.tiled import op_table

A = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
B = torch.randn(4, 3, generator=torch.Generator().manual_seed(2))

REFUSED: dict[str, Any] = {
    "matmul": lambda a, b: a @ b.double(),
    "mm": lambda a, b: a.bool().mm(b.bool()),
    "einsum": lambda a, b: torch.einsum("ij,jk->ik", a, b.double()),
    "baddbmm": lambda a, b: torch.baddbmm(a[None], a[None], (b @ a)[None].double()),
    "cdist": lambda a, b: torch.cdist(a, a.double()),
    "gather": lambda a, b: a.gather(0, torch.zeros(3, 4)),
    "softmax": lambda a, b: F.softmax(a.int(), 0),
    "bilinear": lambda a, b: F.bilinear(a, a, torch.ones(2, 4, 4).double()),
    "avg_pool1d": lambda a, b: F.avg_pool1d(a[:0][None], 2),
    "max_pool1d": lambda a, b: F.max_pool1d(a[:, :0][None], 2),
    "add_": lambda a, b: a.int().add_(a),
}
#: What torch takes, of other dtypes and where not all that is in the tensors is.
TAKEN: dict[str, Any] = {
    "index_select": lambda a, b: a.index_select(0, torch.tensor([1])),
    "embedding": lambda a, b: F.embedding(torch.tensor([2, 2]), a),
    "gather": lambda a, b: a.gather(0, torch.full((3, 4), 2)),
    "floor_divide": lambda a, b: a.int() // (a.int() * 0 + 2),
    "matmul": lambda a, b: a.int() @ b.int(),
    "softmax": lambda a, b: F.softmax(a.double(), 0),
}
LAYOUTS = [
    (Shard(0, (0, 3)), Shard(0, (0, 4))),
    (Shard(1, (0, 4)), Shard(0, (0, 4))),
    (Shard(1, (4, 0)), Shard(1, (0, 3))),
]


def _ran(operator: Any, layouts: tuple[Placement, Placement]) -> list[Any]:
    """What an operator gives on each of two ranks, or its error."""

    def program(rank: int) -> Tensor:
        mesh = init_device_mesh("cpu", (2,))
        a, b = (cut(full, mesh, [its]) for full, its in zip((A, B), layouts, strict=True))
        result: Any = operator(a, b)
        full: Tensor = result.full_tensor()
        return full

    return list(run_ranks(2, program, return_exceptions=True))


@each("layouts", LAYOUTS)
@each("name", REFUSED)
def test_dtypes_are_refused_on_ranks_without_elements(
    name: str, layouts: tuple[Placement, Placement]
) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        REFUSED[name](A, B)
    errors = _ran(REFUSED[name], layouts)
    assert all(isinstance(error, (RuntimeError, NotImplementedError)) for error in errors), errors
    assert len({str(error) for error in errors}) == 1  # none waits for another


@each(
    "call",
    [
        lambda x: torch.addmm(torch.ones(1, 3).int(), x.int()[:, :0], x.int()[:0, :3], beta=0.5),
        lambda x: x[:, :0] @ torch.ones(0, 3).double(),
        lambda x: torch.linalg.cross(x[:, :0], x[:, :0], dim=1),
        lambda x: torch.bincount(x[:, 0].long(), torch.ones(1)),
    ],
)
def test_also_on_ranks_without_rows_of_what_is_empty(call: Callable[[Any], Any]) -> None:
    with pytest.raises((RuntimeError, IndexError)) as expected:
        call(torch.ones(2, 4))

    def program(rank: int) -> None:
        x = distribute_tensor(torch.ones(2, 4), init_device_mesh("cpu", (3,)), [Shard(0)])
        with pytest.raises(type(expected.value), match=f"^{re.escape(str(expected.value))}$"):
            call(x)

    run_ranks(3, program)


@each("layouts", LAYOUTS)
@each("name", TAKEN)
def test_no_others_are(name: str, layouts: tuple[Placement, Placement]) -> None:
    expected = TAKEN[name](A, B)
    for result in _ran(TAKEN[name], layouts):
        assert isinstance(result, Tensor), result
        torch.testing.assert_close(result, expected)


def test_kron_refuses_strides_as_torch_does() -> None:
    a = torch.empty_strided((1, 2, 2, 2), (4, 2, 1, 4)).fill_(1)
    b = a.mT.clone()
    with pytest.raises(RuntimeError, match="view size"):
        torch.kron(a, b)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = cut(torch.ones(2, 2, 2), mesh, [Shard(1)]).unfold(0, 2, 1)
        with pytest.raises(RuntimeError, match="view size"):
            torch.kron(x.clone(), x.mT.clone())

    run_ranks(2, program)


X = torch.arange(12.0).view(4, 3)
CALLS: dict[str, Callable[[Any], Any]] = {
    "view": lambda x: x.view(7),
    "view of two unknown sizes": lambda x: x.view(-1, -1),
    "reshape": lambda x: x.reshape(-1, 5),
    "unflatten": lambda x: x.unflatten(0, (3, 3)),
    "permute": lambda x: x.permute(0, 0),
    "transpose": lambda x: x.transpose(0, 5),
    "expand": lambda x: x.expand(5, 3),
    "sum": lambda x: x.sum(4),
    "cumsum": lambda x: x.cumsum(4),
    "split": lambda x: x.split([1, 1]),
    "add": lambda x: x + torch.ones(5),
    "add_": lambda x: x.add_(torch.ones(7)),
    "copy_": lambda x: x.copy_(torch.ones(7)),
    "matmul": lambda x: x @ x,
    "cat": lambda x: torch.cat([x, torch.ones(2, 2)]),
    "where": lambda x: torch.where(torch.ones(5, dtype=torch.bool), x, x),
}


@each("name", CALLS)
@each("placement", [Shard(0), Partial()])
def test_nothing_is_gathered_to_refuse_a_call(name: str, placement: Placement) -> None:
    call = CALLS[name]
    with pytest.raises((RuntimeError, IndexError)) as expected:
        call(X.clone())

    def program(rank: int) -> None:
        x = distribute_tensor(X, init_device_mesh("cpu", (2,)), [placement])
        with explain() as log, pytest.raises(type(expected.value)):
            call(x)
        assert not log.events
        assert torch.equal(x.full_tensor(), X)

    run_ranks(2, program)


def test_the_words_are_torchs() -> None:
    def program(rank: int) -> None:
        x = distribute_tensor(X, init_device_mesh("cpu", (2,)), [Shard(0)])
        with pytest.raises(RuntimeError, match="must match the size of tensor b"):
            x.add_(torch.ones(5))
        with pytest.raises(RuntimeError, match=r"shape '\[7\]' is invalid for input of size 12"):
            x.view(7)

    run_ranks(2, program)


@pairs(
    call=[
        lambda x: torch.combinations(x),
        lambda x: torch.linalg.vector_norm(x.double(), dim=0, dtype=torch.float32),
        lambda x: F.group_norm(x.view(1, -1, 3), 2, torch.ones(1)),
        lambda x: F.batch_norm(x, None, None, torch.ones(1), training=True),
        lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(3), training=True),
        lambda x: F.prelu(x, torch.ones(2)),
        lambda x: x.clone().cumsum_(0, dtype=torch.float64),
        lambda x: torch.take(x, torch.tensor([1], dtype=torch.int32)),
        lambda x: torch.ops.aten.roll(x, 2),
    ],
    placement=[Shard(0), Shard(1)],
    times=[1, 200],
)
def test_what_other_code_computes_is_refused_in_torchs_words(
    call: Callable[[Any], Any], placement: Placement, times: int
) -> None:
    full = X.repeat(times, 1)
    with pytest.raises(RuntimeError) as expected:
        call(full.clone())

    def program(rank: int) -> None:
        x = distribute_tensor(full, init_device_mesh("cpu", (2,)), [placement])
        with pytest.raises(RuntimeError, match=f"^{re.escape(str(expected.value))}$"):
            call(x)

    run_ranks(2, program)


def test_lengths_that_only_some_elements_fit_are_taken() -> None:
    repeats = torch.tensor([1, 0, 2, 2])

    def program(rank: int) -> None:
        x = distribute_tensor(X, init_device_mesh("cpu", (2,)), [Shard(1)])
        with strict():
            result: Any = torch.repeat_interleave(x, repeats, 0, output_size=5)
        assert torch.equal(result.full_tensor(), X.repeat_interleave(repeats, 0))

    run_ranks(2, program)


_seen: list[tuple[int, ...]] = []


@torch.library.custom_op("own_refused::summed", mutates_args=())
def summed(x: torch.Tensor) -> torch.Tensor:
    _seen.append(tuple(x.shape))
    return x.double().sum(dim=0)


@pytest.fixture
def its_rule() -> Iterator[None]:
    yield
    op_table.forget(torch.ops.own_refused.summed)
    forget_handler(torch.ops.own_refused.summed)


@pytest.mark.usefixtures("its_rule")
@pytest.mark.parametrize("has_rule", [False, True])
def test_operators_of_ones_own_are_called_with_nothing_made_up(has_rule: bool) -> None:
    """They may do more than return a result."""
    if has_rule:
        register_rule(torch.ops.own_refused.summed, "r c -> c", linear=[[0]])

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(X[:1].bfloat16(), mesh, [Shard(0)])  # rank 1 has no elements
        result = torch.ops.own_refused.summed(x)
        assert torch.equal(result.full_tensor(), X[0].double())

    _seen.clear()
    run_ranks(2, program)
    assert sorted(_seen) == ([(0, 3), (1, 3)] if has_rule else [(1, 3), (1, 3)])


def test_what_torch_refuses_only_without_memory_is_computed() -> None:
    """Products of groups look at strides, and have no meta kernel for float32."""
    x, weights = torch.randn(4, 16), torch.randn(16, 8)
    ends = torch.tensor([3, 16], dtype=torch.int32)
    try:
        expected = torch._grouped_mm(x, weights, offs=ends)
    except (AttributeError, RuntimeError) as error:
        pytest.skip(f"this torch has no such product: {error}")

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        sharded = distribute_tensor(x, mesh, [Shard(1)])
        experts = distribute_tensor(weights, mesh, [Shard(0)])
        result: Any = torch._grouped_mm(sharded, experts, offs=ends)
        assert torch.equal(result.full_tensor(), expected)

    with noting_gatherings():
        run_ranks(2, program)
