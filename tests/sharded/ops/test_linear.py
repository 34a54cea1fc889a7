"""Products with sharded weights: values, gradients, bytes, and ranks that disagree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as hs
from torch import Tensor, nn
from torch.nn import functional as F

import tilework.distributed as dist
from tests.rounding import assert_close
from tests.sharded.ops.op_checks import CUTS, RANKS, close, shards_of, values
from tests.sharded.ranks_and_specs import check_all_raise, chunks, cut, examples, grid, on, specs
from tests.tables import each
from tilework.sharded import ShardedTensor, ShardingSpec
from tilework.sharded.ops import exchange as exchanging
from tilework.sharded.ops import linear as linear_module
from tilework.testing import run_ranks

#: Rows of each rank's input: few, so that inputs move; many, so that the weight does.
ROWS = {"few": (2, 0, 3), "many": (40, 50, 60)}


def check_product(
    rank: int,
    multiply: Callable[[Tensor, Any, Any], Tensor],
    weight: Tensor,
    bias: Tensor | None,
    spec: ShardingSpec,
    inputs: list[Tensor],
    sharded_bias: bool = False,
) -> None:
    """Each rank gets what the whole weight gives; gradients are those of the sum of all losses."""
    parameters = [weight.clone().requires_grad_(), bias if bias is None else bias.clone()]
    if parameters[1] is not None:
        parameters[1].requires_grad_()
    plain = [x.clone().requires_grad_() for x in inputs]
    expected = [multiply(x, *parameters) for x in plain]
    losses = [(y.square().sum() * (r + 1)) for r, y in enumerate(expected)]
    torch.autograd.backward(torch.stack(losses).sum())

    tensor = shards_of(weight.clone().requires_grad_(), spec, rank)
    other: Any = bias
    if bias is not None:
        other = bias.clone().requires_grad_()
        if sharded_bias:
            other = shards_of(other, chunks(0, [2, 1]), rank)
    x = inputs[rank].clone().requires_grad_()
    found = multiply(x, tensor, other)
    assert type(found) is Tensor
    assert found.requires_grad
    close(found, expected[rank])
    torch.autograd.backward(found.square().sum() * (rank + 1))
    assert x.grad is not None
    close(x.grad, _gradient(plain[rank]))
    close(_full(tensor.grad), _gradient(parameters[0]))
    if sharded_bias:
        close(_full(other.grad), _gradient(parameters[1]))


def _gradient(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    assert tensor.grad is not None
    return tensor.grad


def _full(tensor: Any) -> Tensor:
    assert isinstance(tensor, ShardedTensor)
    return tensor.full_tensor()


def inputs_of(rows: tuple[int, ...], columns: int) -> list[Tensor]:
    return [values(n, columns, seed=n) for n in rows]


@pytest.mark.parametrize("bias", ["none", "plain", "sharded"])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("spec", CUTS.values(), ids=CUTS.keys())
def test_linear(spec: ShardingSpec, rows: tuple[int, ...], bias: str) -> None:
    vector = None if bias == "none" else values(5, seed=9)
    on(RANKS, lambda rank: check_product(rank, F.linear, values(5, 4), vector, spec,
        inputs_of(rows, 4), bias == "sharded"))  # fmt: skip


@examples(25)
@given(hs.data())
def test_linear_with_any_cut(data: hs.DataObject) -> None:
    size = data.draw(hs.sampled_from([(6, 4), (1, 3), (3, 8)]))
    spec = data.draw(specs(size, (0, 1, 2)))
    rows = data.draw(hs.tuples(*[hs.integers(0, 4)] * RANKS))
    on(RANKS, lambda rank: check_product(rank, F.linear, values(*size), None, spec,
        inputs_of(rows, size[1])))  # fmt: skip


_PRODUCTS: dict[str, Callable[[Any, Any], Any]] = {
    "x @ w": lambda x, w: x @ w.T,
    "torch.matmul": lambda x, w: torch.matmul(x, w.T),
    "mm": lambda x, w: x.mm(w.T),
    "w @ x": lambda x, w: (w @ x.T).T,
    "torch.mm": lambda x, w: torch.mm(w, x.T).T,
    "batches": lambda x, w: F.linear(x.unsqueeze(1).expand(-1, 2, -1), w),
}


@each("multiply", _PRODUCTS.values())
def test_other_products(multiply: Callable[[Any, Any], Any]) -> None:
    def program(rank: int) -> None:
        for spec in CUTS.values():
            check_product(rank, lambda x, w, _: multiply(x, w), values(5, 4), None, spec,
                inputs_of((2, 1, 3), 4))  # fmt: skip

    on(RANKS, program)


def test_vectors() -> None:
    weight, vector = values(5, 4), values(4)

    def program(rank: int) -> None:
        for spec in CUTS.values():
            tensor = shards_of(weight, spec, rank)
            for found in (F.linear(vector, tensor), torch.mv(tensor, vector), tensor @ vector):
                close(found, weight @ vector)

    on(RANKS, program)


@each("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_dtypes(dtype: torch.dtype) -> None:
    weight, x = values(4, 8, dtype=dtype), values(3, 8, dtype=dtype, seed=1)

    def program(rank: int) -> None:
        found = F.linear(x, shards_of(weight, chunks(1, [0, 1, 2]), rank))
        assert found.dtype == dtype
        assert_close(found, x @ weight.T, rtol=0.05, atol=0.3)

    on(RANKS, program)


def test_autocast() -> None:
    weight, x, bias = (values(*size, dtype=torch.float32) for size in ((4, 8), (3, 8), (4,)))

    def program(rank: int) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            for each_bias in (None, bias):
                found = F.linear(x, shards_of(weight, chunks(1, [0, 1, 2]), rank), each_bias)
                expected = F.linear(x, weight, each_bias)
                assert found.dtype is expected.dtype is torch.bfloat16
                assert_close(found, expected, rtol=0.05, atol=0.3)

    on(RANKS, program)


def test_a_module_with_a_sharded_weight() -> None:
    def program(rank: int) -> None:
        module, whole = nn.Linear(4, 5).double(), values(5, 4)
        module.weight = nn.Parameter(shards_of(whole, CUTS["grid"], rank))
        x = values(3, 4, seed=rank)
        close(module(x), F.linear(x, whole, module.bias))
        with torch.no_grad():
            assert not module(x).requires_grad

    on(RANKS, program)


@pytest.mark.parametrize("size", [(0, 4), (5, 0)])
def test_weights_without_elements(size: tuple[int, int]) -> None:
    def program(rank: int) -> None:
        tensor = shards_of(values(*size).requires_grad_(), chunks(0, [0, 1]), rank)
        x = values(3, size[1]).requires_grad_()
        found = F.linear(x, tensor)
        close(found, F.linear(x, values(*size)))
        torch.autograd.backward(found.sum())

    on(RANKS, program)


def test_ranks_that_are_processes() -> None:
    whole, ids = values(5, 4), torch.tensor([4, 0, 4])

    def program(rank: int) -> float:
        tensor: Any = shards_of(whole.clone().requires_grad_(), CUTS["empty rows"], rank)
        x = values(2 + rank, 4, seed=rank)
        product, rows = F.linear(x, tensor), F.embedding(ids, tensor)
        close(product, F.linear(x, whole))
        close(rows, whole[ids])
        torch.autograd.backward(product.sum() + rows.sum() + (tensor * 2).sum())
        value: float = tensor.grad.full_tensor()[4, 0].item()
        return value

    found = run_ranks(RANKS, program, kind="processes")
    inputs = sum(float(values(2 + rank, 4, seed=rank)[:, 0].sum()) for rank in range(RANKS))
    assert found == pytest.approx([inputs + RANKS * 2 + 2] * RANKS)


def test_a_group_of_some_ranks() -> None:
    whole = values(5, 4)

    def program(rank: int) -> None:
        group = dist.new_group([0, 2])
        tensor = cut(whole, chunks(0, [2, 0]), rank, process_group=group)
        x = values(3, 4, seed=rank)
        if rank == 1:
            with pytest.raises(ValueError, match="not in the tensor's group"):
                F.linear(x, tensor)
        else:
            close(F.linear(x, tensor), F.linear(x, whole))

    on(RANKS, program)


def test_activations_move_if_that_is_less_than_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[int] = []

    def seen(tensor: ShardedTensor) -> Tensor:
        gathered.append(1)
        return exchanging.spread(tensor)

    monkeypatch.setattr(linear_module, "spread", seen)
    for rows, weight_moves in ((3, False), (300, True)):
        gathered.clear()
        on(2, lambda rank, rows=rows: F.linear(  # type: ignore[misc]
            values(rows, 64), shards_of(values(32, 64), chunks(0, [0, 1]), rank)))  # fmt: skip
        assert bool(gathered) == weight_moves


def test_bytes_that_move() -> None:
    """Rows of a weight: each rank gets all inputs; columns: each gets its columns of them."""
    sent: list[int] = []

    def counted(parts: Any, received: Any, group: Any) -> Any:
        if group.rank() == 0:
            sent.append(sum(received) - received[0])
        return exchanging.exchange(parts, received, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_module, "exchange", counted)
        for dim, expected in ((0, [2 * 64, 2 * 16]), (1, [2 * 32, 2 * 32])):
            sent.clear()
            on(2, lambda rank, dim=dim: F.linear(  # type: ignore[misc]
                values(2, 64), shards_of(values(32, 64), chunks(dim, [0, 1]), rank)))  # fmt: skip
            assert sent == expected


_BAD: dict[str, tuple[Callable[[int, Any], Any], type[Exception], str]] = {
    "columns": (lambda rank, w: F.linear(torch.ones(2, 4 - (rank == 1)).double(), w),
        RuntimeError, "must have 4 elements"),
    "dtype": (lambda rank, w: F.linear(torch.ones(2, 4, dtype=(torch.half, torch.double)[rank]), w),
        RuntimeError, "must have one dtype"),
    "gradient": (lambda rank, w: F.linear(torch.ones(2, 4).double().requires_grad_(rank == 1), w),
        ValueError, "on all ranks or on none"),
    "sharded input": (lambda rank, w: F.linear(w, w), RuntimeError, "not supported for Sharded"),
    "two sharded": (lambda rank, w: w @ w.T, RuntimeError, "not supported for ShardedTensor!$"),
    "plain weight": (lambda rank, w: F.linear(w, torch.ones(5, 4)), RuntimeError, "not supported"),
}  # fmt: skip


@each(("compute", "kind", "pattern"), _BAD.values())
def test_what_is_wrong_on_one_rank_raises_on_all(
    compute: Callable[[int, Any], Any], kind: type[Exception], pattern: str
) -> None:
    check_all_raise(
        2,
        lambda rank: compute(rank, shards_of(values(5, 4), grid([5], [2, 2], [0, 1]), rank)),
        kind,
        pattern,
    )
