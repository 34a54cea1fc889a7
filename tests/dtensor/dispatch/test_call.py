"""Calls that users found missing, and errors that come at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.dtensor.op_checks import check_op, noting_gatherings
from tests.dtensor.sharded_values import cut, same
from tests.tables import each
from tilework.dtensor import (
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from tilework.testing import run_ranks

GRID = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


def test_operators_that_users_missed() -> None:
    """pytorch#147724, #147578, #152249, #167917, #130671, and some of pytorch#119930."""

    def floats(x: Tensor) -> list[Tensor]:
        filled = x.clone().masked_fill_(x > 0, 9)
        return [
            *(x.select(0, 1), x.select(1, -1), x.amax(1), x.amin(), x.aminmax().max, filled),
            *(x.flip(1), x.roll(1, 0), x.tril(), x.diagonal(), x.unfold(1, 2, 2), x.repeat(2, 1)),
            *(x.unique(), x.histc(4), torch.outer(x[0], x[1]), x.kthvalue(2).values),  # type: ignore[no-untyped-call]
            *(
                x.scatter_add(1, x.argsort(1), x),
                x.gather(1, x.argsort(1)),
                x.index_select(0, ones),
            ),
        ]

    def integers(x: Tensor) -> list[Tensor]:
        bits = [x << 1, x >> 1, x & 3, x | 4, x ^ 1, ~x, x.bitwise_left_shift(2), 1 << (x % 5)]
        return [*bits, x.bincount() if x.dim() == 1 else x.view(-1).bincount(), x // 3, x % 4]

    ones = torch.ones(3, dtype=torch.int64)
    with noting_gatherings():
        check_op(floats, GRID, grads=False, meshes=((2,),), rtol=1e-4, atol=1e-5)
        check_op(integers, torch.arange(24).view(4, 6), partial=(), meshes=((3,),), most=4)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x = cut(GRID, mesh, [Shard(0)]).requires_grad_() * 2
        x.detach_()
        assert x.is_leaf
        assert not x.requires_grad
        assert int(cut(torch.tensor([7]), mesh, [Replicate()])) == 7

    run_ranks(2, program)


@pytest.mark.parametrize(
    "call",
    [
        "x @ x",
        "x + torch.ones(5)",
        "x.view(5, 5)",
        "x[9]",
        "x.sum(7)",
        "x.transpose(0, 5)",
        "torch.cat([x, x.t()])",
        "x.softmax(3)",
        "F.linear(x, torch.ones(3, 4))",
        "F.cross_entropy(x, torch.zeros(3, dtype=torch.int64))",
        "F.layer_norm(x, (5,))",
        "x.gather(2, torch.zeros(1, dtype=torch.int64))",
        "x.expand(3, 6)",
        "x.reshape(-1, 7)",
        "x.split([1, 1])",
        "x & x",
        "x.item()",
        "bool(x)",
        "x.backward()",
        "x.add_(torch.ones(3, 4, 6))",
        "x.index_select(0, torch.tensor([9]))",
        "x[torch.tensor([7])]",
        "torch.stack([x, x[0]])",
        "x.no_such_method()",
        'x.add("text")',
        "x.squeeze(0).unsqueeze(9)",
        "len(x.sum())",
        "torch.dot(x[0], x[:, 0])",
        "x.permute(0, 0)",
        "x.chunk(0)",
        "x.masked_fill_(torch.ones(3, 3, dtype=torch.bool), 0)",
        "F.dropout(x, 2.0)",
        "F.embedding(torch.tensor([9]), x)",
        "x.requires_grad_().zero_()",
    ],
)
def test_errors_come_at_once_and_are_torchs(call: str) -> None:
    """pytorch#124990: what is wrong with a call on plain tensors is wrong in the same way here."""

    def kind_of(x: Tensor) -> type[Exception] | None:
        try:
            eval(call, {"torch": torch, "F": F, "x": x})
        except Exception as error:
            return type(error)
        return None

    kind = kind_of(GRID.clone())
    assert kind is not None

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for placement in (Shard(0), Shard(1), Replicate()):
            found = kind_of(cut(GRID, mesh, [placement]))
            assert found is not None, placement
            assert issubclass(found, kind) or issubclass(kind, found), (placement, found)
        same(cut(GRID, mesh, [Shard(0)]) + 1, GRID + 1)  # and everything goes on

    with noting_gatherings():
        run_ranks(2, program)


def test_results_of_torch_ops_are_lists_and_plain_tuples() -> None:
    ops: Any = torch.ops.aten

    def kinds(x: Tensor) -> list[type]:
        results = [ops.split_with_sizes_copy(x, [1, 5], 1), ops.unsafe_split(x, 2, 1)]
        results += [ops.split(x, 2), ops.where(x > 0), ops.broadcast_tensors([x, x])]
        results += [ops.aminmax(x), ops.max(x, 0), ops.split.Tensor(x, 3), ops.unbind_copy(x)]
        return [type(result) for result in results]

    def program(rank: int) -> None:
        x = distribute_tensor(GRID, init_device_mesh("cpu", (2,)), [Shard(0)])
        assert kinds(x) == kinds(GRID)

    run_ranks(2, program)


def test_in_place_powers_of_what_is_no_number() -> None:
    def program(rank: int) -> None:
        x: Any = distribute_tensor(torch.ones(2), init_device_mesh("cpu", (2,)), [Shard(0)])
        with pytest.raises(TypeError, match=r"unsupported operand type\(s\) for \*\*="):
            x **= (1.0,)

    run_ranks(2, program)


def test_zeros_of_either_sign_are_different_numbers() -> None:
    """They are equal, but 1 / x is not: calls with them share no sharding."""

    def program(rank: int) -> None:
        x: Any = distribute_tensor(torch.ones(2, 2), init_device_mesh("cpu", (2,)), [Shard(0)])
        for value in (0.0, -0.0, 0.0):
            padded = cast(Any, F.pad(x, (1, 1), value=value)).full_tensor()
            assert bool(torch.signbit(padded[0, 0])) == (str(value) == "-0.0")
            filled = cast(Any, torch.where(x > 2, x, value)).full_tensor()
            assert bool(torch.signbit(filled[0, 0])) == (str(value) == "-0.0")
            whole = cast(Any, torch.full_like(x, value)).full_tensor()
            assert bool(torch.signbit(whole[0, 0])) == (str(value) == "-0.0")

    run_ranks(2, program)


INF = float("inf")


@each(
    "call",
    [
        lambda x: x.sum() / 0,
        lambda x: x.mean() * INF,
        lambda x: x.sum() * -INF,
        lambda x: x.sum() / np.float64(0),
        lambda x: x.sum().mul_(INF),
        lambda x: x.sum().div_(-0.0),
        lambda x: x.clone().mul_(INF),
        lambda x: torch.add(x.sum(), x.sum(), alpha=INF),
        lambda x: torch.lerp(x.sum(), x.sum() * 2, INF),
        lambda x: torch._foreach_mul([x.sum()], INF)[0],
        lambda x: torch.addmm(x[:1, :1] * 0, x.view(1, 4), torch.ones(4, 1), alpha=INF),
        lambda x: torch.autograd.grad((x.requires_grad_() * INF).sum(), x)[0],
    ],
)
@each("placement", [Partial(), Partial("avg"), Shard(0), Shard(1), Replicate()])
def test_infinity_times_a_part_of_a_sum_is_no_part_of_it(
    call: Callable[[Any], Any], placement: Placement
) -> None:
    """The parts that ranks have are 0, or of another sign than the sum."""
    full = torch.tensor([[3.0, -1.0], [2.0, -0.5]])

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        found = call(distribute_tensor(full, mesh, [placement])).full_tensor()
        torch.testing.assert_close(found, call(full.clone()), equal_nan=True)

    run_ranks(2, program)


def test_data_of_partial_inference_tensors_may_be_written_to() -> None:
    """Outside inference mode, where the tensors themselves may not: as torch has it."""

    def program(rank: int) -> None:
        with torch.inference_mode():
            x: Any = distribute_tensor(torch.ones(2, 2), init_device_mesh("cpu", (2,)), [Partial()])
        x.data.add_(3)
        assert x.full_tensor().eq(4).all()
        with pytest.raises(RuntimeError, match="inference tensor"):
            x.add_(3)

    run_ranks(2, program)


def test_names_and_positions_find_one_sharding() -> None:
    def program(rank: int) -> int:
        mesh = init_device_mesh("cpu", (2,))
        x, w, b = cut(GRID, mesh, [Shard(0)]), *(cut(GRID[i], mesh, [Replicate()]) for i in (0, 1))
        by_place: Any = F.layer_norm(x, (6,), w, b)
        known = len(mesh.op_shardings)
        by_name = F.layer_norm(x, (6,), weight=w, bias=b)
        same(by_name, by_place.full_tensor())
        return len(mesh.op_shardings) - known

    assert run_ranks(2, program) == [0, 0]


def test_a_call_by_torchs_protocol_may_name_the_arguments() -> None:
    def program(rank: int) -> None:
        x = cut(GRID, init_device_mesh("cpu", (2,)), [Shard(0)])
        call: Any = type(x).__torch_function__
        same(call(torch.relu, (type(x),), args=(x,), kwargs=None), GRID.relu())
        same(call(torch.sum, (type(x),), (x,), {"dim": 0}), GRID.sum(0))

    run_ranks(2, program)
