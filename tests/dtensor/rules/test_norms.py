"""Normalisation over whole and cut dims, and what it writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.dtensor.op_checks import Layouts, check_op, count_op
from tests.dtensor.sharded_values import cut, full, spread
from tests.rounding import assert_close
from tests.tables import each
from tilework.dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from tilework.testing import run_ranks

FEW: dict[str, Any] = {"meshes": [(2,), (2, 2)], "most": 5, "gathers": False}


def randn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=dtype)


@each("shape", [(5, 2, 6), (1, 3, 2), (0, 2, 3)])
def test_layer_norm(shape: tuple[int, ...]) -> None:
    weight, bias = randn(*shape[1:]), randn(*shape[1:]) + 1
    check_op(lambda x: F.layer_norm(x, shape[2:]), randn(*shape), **FEW)
    check_op(
        lambda x, w, b: F.layer_norm(x, shape[1:], w, b),
        *(randn(*shape), weight, bias),
        **FEW,
    )


@each("dim", [0, 1, 2, -1])
def test_norms_of_weights(dim: int) -> None:
    shape = (3, 4, 2)
    norms = randn(*[size if at == dim else 1 for at, size in enumerate(shape)]).abs() + 1
    check_op(
        lambda v, g: torch._weight_norm(v, g, dim),
        *(randn(*shape), norms[0, 0, 0] if dim < 0 else norms),
        **{**FEW, "most": 12},
    )


def test_rms_norm() -> None:
    check_op(lambda x, w: F.rms_norm(x, (6,), w), randn(5, 6), randn(6), **FEW)
    check_op(lambda x: F.rms_norm(x, (4, 6), eps=0.1), randn(5, 4, 6), **FEW)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(dtype: torch.dtype) -> None:
    x, w = randn(4, 64, dtype=dtype), randn(64, dtype=dtype)
    layouts: list[Layouts] = [[[Shard(1)], [Shard(0)]]]
    for norm in (F.layer_norm, F.rms_norm):
        check_op(
            lambda x, w, norm=norm: norm(x, (64,), w),
            *(x, w),
            meshes=[(2,)],
            layouts=lambda _: layouts,
            gathers=False,
            rtol=2e-2,
            atol=1e-2,
        )


@each("groups", [1, 2, 4])
def test_group_norm(groups: int) -> None:
    weight, bias = randn(8), randn(8) + 1
    check_op(
        lambda x, w, b: F.group_norm(x, groups, w, b),
        *(randn(3, 8, 2, 3), weight, bias),
        **FEW,
    )


def test_instance_norm() -> None:
    x, weight, bias = randn(3, 4, 5), randn(4), randn(4) + 1
    check_op(lambda x: F.instance_norm(x), x, **FEW)
    check_op(lambda x, w, b: F.instance_norm(x, None, None, w, b), x, weight, bias, **FEW)

    def written(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return F.instance_norm(x, mean, var, momentum=0.3)

    check_op(written, x, randn(4), randn(4).abs(), grads=None, partial=(), **FEW)


def test_batch_norm() -> None:
    x, weight, bias = randn(4, 6, 2), randn(6), randn(6) + 1
    mean, var = randn(6) * 2, randn(6).abs() + 1
    x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()
    for training in (False, True):
        check_op(
            lambda x, w, b, m, v, training=training: F.batch_norm(x, m, v, w, b, training, 0.2),
            *(x, weight, bias, mean, var),
            grads=None,
            partial=(),
            **FEW,
        )
    check_op(lambda x: F.batch_norm(x, None, None, training=True), x, **FEW)


def test_statistics_are_of_the_whole_batch() -> None:
    plain = nn.BatchNorm1d(3)
    x = randn(7, 3, dtype=torch.float32)

    def program(rank: int) -> list[Tensor]:
        mesh = init_device_mesh("cpu", (2,))
        norm = spread(plain, mesh)
        assert isinstance(norm, nn.BatchNorm1d)
        for name, buffer in list(norm.named_buffers()):
            norm._buffers[name] = distribute_tensor(buffer, mesh, [Replicate()])
        given = distribute_tensor(x, mesh, [Shard(0)])
        norm(given)
        trained = [full(norm.running_mean), full(norm.running_var), full(norm.num_batches_tracked)]
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            F.batch_norm(distribute_tensor(x[:1], mesh), None, None, training=True)
        return [*trained, full(norm.eval()(given))]

    found = run_ranks(2, program)
    plain(x)
    wanted = [plain.running_mean, plain.running_var, plain.num_batches_tracked, plain.eval()(x)]
    for mine in found:
        for one, want in zip(mine, wanted, strict=True):
            assert_close(one, want.detach())


def test_cut_features_take_two_small_reductions() -> None:
    layouts: Sequence[Sequence[Shard]] = [[Shard(1)], [Shard(0)]]
    seen = count_op(lambda x, w: F.layer_norm(x, (6,), w), randn(5, 6), randn(6), layouts=layouts)
    assert seen.forward == ["all_reduce"] * 2
    assert seen.placements == [(Shard(1),)]
    assert len(seen.backward) <= 2
    local = count_op(
        lambda x, w: F.layer_norm(x, (6,), w),
        *(randn(5, 6), randn(6)),
        layouts=[[Shard(0)], [Replicate()]],
    )
    assert local.forward == []


def test_local_response_norm() -> None:
    check_op(lambda x: F.local_response_norm(x, 3), randn(4, 5, 3).abs(), **FEW)


GRID = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


def test_plain_running_statistics_are_those_of_the_whole_batch() -> None:
    """A plain ``BatchNorm`` module in training, with an input whose rows are cut."""
    plain = nn.BatchNorm1d(6)
    plain(GRID)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for placement in (Shard(0), Shard(1), Replicate()):
            module = nn.BatchNorm1d(6)
            module(cut(GRID, mesh, [placement]))
            assert_close(module.running_mean, plain.running_mean)
            assert_close(module.running_var, plain.running_var)

    run_ranks(2, program)


#: Norms of rows of eight by a weight, without an epsilon.
WITHOUT_EPSILON: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "layer_norm": lambda x, w: F.layer_norm(x, (4,), w, eps=0.0),
    "rms_norm": lambda x, w: F.rms_norm(x, (4,), w, eps=0.0),
    "group_norm": lambda x, w: F.group_norm(x.mT, 2, w, eps=0.0),
    "instance_norm": lambda x, w: F.instance_norm(x.mT, weight=w, eps=0.0),
}


@each("name", WITHOUT_EPSILON)
def test_a_rank_without_rows_adds_nothing_to_the_gradient_of_weights(name: str) -> None:
    """What stands there for a row must have a deviation: none times infinity would be NaN."""
    x, w = torch.randn(2, 3, 4), torch.randn(4, requires_grad=True)
    torch.autograd.backward(WITHOUT_EPSILON[name](x, w).square().sum())

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (3,))
        shards = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
        weight = distribute_tensor(w.detach(), mesh, [Replicate()]).requires_grad_()
        torch.autograd.backward(WITHOUT_EPSILON[name](shards, weight).square().sum())
        assert weight.grad is not None
        assert_close(weight.grad.full_tensor(), w.grad)

    run_ranks(3, program)
