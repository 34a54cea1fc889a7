"""SyncBatchNorm equals batch normalisation over the rows of all ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tilework.distributed as dist
from tests.rounding import assert_close
from tilework.parallel import DistributedDataParallel, SyncBatchNorm, fully_shard
from tilework.testing import run_ranks

KINDS = [
    (nn.BatchNorm1d, ()),
    (nn.BatchNorm1d, (5,)),
    (nn.BatchNorm2d, (3, 4)),
    (nn.BatchNorm3d, (2, 3, 2)),
]


def rows_of(cuts: list[int], rank: int) -> slice:
    return slice(sum(cuts[:rank]), sum(cuts[: rank + 1]))


def compare(rank: int, plain: nn.Module, cuts: list[int], inner: tuple[int, ...]) -> None:
    """Two steps of both, with gradients and running statistics."""
    layer = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    generator = torch.Generator().manual_seed(1)
    own = rows_of(cuts, rank)
    for _ in range(2):
        shape = (sum(cuts), 3, *inner)
        x = (3 * torch.randn(shape, generator=generator, dtype=torch.double) + 5).requires_grad_()
        weights = torch.randn(shape, generator=generator, dtype=torch.double)
        mine = x.detach()[own].clone().requires_grad_()
        expected, got = plain(x), layer(mine)
        assert_close(got, expected[own])
        (expected * weights).sum().backward()
        (got * weights[own]).sum().backward()
        assert x.grad is not None
        assert_close(mine.grad, x.grad[own])
        for parameter, wanted in zip(layer.parameters(), plain.parameters(), strict=True):
            assert parameter.grad is not None
            total = parameter.grad.clone()
            dist.all_reduce(total)
            assert_close(total, wanted.grad)
            parameter.grad = wanted.grad = None
        for name, buffer in plain.named_buffers():
            assert_close(layer.get_buffer(name), buffer, check_dtype=False)


@pytest.mark.parametrize(("kind", "inner"), KINDS)
@pytest.mark.parametrize("cuts", [[2, 3], [1, 0, 4], [5]])
def test_values_gradients_and_statistics(
    kind: type[nn.Module], inner: tuple[int, ...], cuts: list[int]
) -> None:
    plain = kind(3).double()
    run_ranks(len(cuts), lambda rank: compare(rank, copy.deepcopy(plain), cuts, inner))


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": None},
        {"affine": False},
        {"track_running_stats": False},
        {"eps": 0.1, "momentum": 0.7},
    ],
)
def test_settings(options: dict[str, Any]) -> None:
    plain = nn.BatchNorm2d(3, **options).double()
    run_ranks(2, lambda rank: compare(rank, copy.deepcopy(plain), [2, 3], (2, 2)))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=2, max_size=3).filter(lambda cuts: sum(cuts) > 1))
def test_any_rows_per_rank(cuts: list[int]) -> None:
    plain = nn.BatchNorm1d(3).double()
    run_ranks(len(cuts), lambda rank: compare(rank, copy.deepcopy(plain), cuts, ()))


def test_one_collective_each_way() -> None:
    def program(rank: int) -> tuple[int, int]:
        group = dist.get_default_group()
        layer = SyncBatchNorm(3)
        start = group.get_sequence_number_for_group()
        out = layer(torch.ones(2, 3).requires_grad_())
        middle = group.get_sequence_number_for_group()
        out.sum().backward()
        return middle - start, group.get_sequence_number_for_group() - middle

    assert run_ranks(2, program) == [(1, 1)] * 2


@pytest.mark.parametrize("empty", [[0], [0, 1]], ids=["first", "all"])
@pytest.mark.parametrize("graded", [True, False])
@pytest.mark.parametrize("deep", [False, True])
def test_inputs_without_rows(empty: list[int], graded: bool, deep: bool) -> None:
    def program(rank: int) -> None:
        layers: list[nn.Module] = [nn.BatchNorm2d(2)]
        if deep:
            layers = [nn.Conv2d(2, 2, 3), *layers, nn.Linear(8, 2)]
        ddp = DistributedDataParallel(nn.Sequential(*layers))
        SyncBatchNorm.convert_sync_batchnorm(ddp)
        x = torch.zeros(0 if rank in empty else 3, 2, 10, 10, requires_grad=graded)
        y = ddp(x)
        assert not y.isnan().any()
        y.sum().backward()
        for parameter in ddp.parameters():
            assert parameter.grad is not None
            assert not parameter.grad.isnan().any()
        for buffer in ddp.buffers():
            assert torch.isfinite(buffer).all()

    run_ranks(2, program)


def test_half_precision_inputs_have_statistics_in_single() -> None:
    def program(rank: int) -> tuple[torch.dtype, torch.dtype]:
        layer = SyncBatchNorm(2)
        out = layer(torch.full((4, 2), 1000.0 + 8 * rank, dtype=torch.bfloat16))
        assert out[0, 0].item() == pytest.approx(1.0 if rank else -1.0, abs=0.01)
        assert layer.running_mean is not None
        return out.dtype, layer.running_mean.dtype

    assert run_ranks(2, program)[0] == (torch.bfloat16, torch.float32)


def test_channels_last() -> None:
    def program(rank: int) -> bool:
        x = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
        return bool(SyncBatchNorm(3)(x).is_contiguous(memory_format=torch.channels_last))

    assert run_ranks(2, program) == [True, True]


def test_gradients_of_gradients() -> None:
    def program(rank: int) -> None:
        generator = torch.Generator().manual_seed(2)
        x, w = torch.randn(2, 6, 2, generator=generator, dtype=torch.double)
        plain = nn.BatchNorm1d(2).double()
        layer = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
        own = slice(3 * rank, 3 * rank + 3)

        def twice(module: nn.Module, rows: Tensor, weights: Tensor) -> Tensor:
            rows = rows.clone().requires_grad_()
            value = (module(rows).square() * weights).sum()
            (grad,) = torch.autograd.grad(value, rows, create_graph=True)
            torch.autograd.backward(grad.square().sum())
            assert rows.grad is not None
            return rows.grad

        assert_close(twice(layer, x[own], w[own]), twice(plain, x, w)[own])

    run_ranks(2, program)


def test_evaluation_is_local() -> None:
    def program(rank: int) -> int:
        group = dist.get_default_group()
        layer = SyncBatchNorm(3).eval()
        start = group.get_sequence_number_for_group()
        assert_close(layer(torch.ones(2, 3)), torch.ones(2, 3), rtol=1e-4, atol=1e-4)
        SyncBatchNorm(3, track_running_stats=False).eval()(torch.ones(2, 3))
        return group.get_sequence_number_for_group() - start

    assert run_ranks(2, program) == [0, 0]


def test_conversion_both_ways() -> None:
    def program(rank: int) -> None:
        net = nn.Sequential(nn.BatchNorm1d(2), nn.ModuleDict({"inner": nn.BatchNorm2d(3)}))
        weight = net[0].weight
        assert SyncBatchNorm.convert_sync_batchnorm(net) is net
        assert isinstance(net[0], SyncBatchNorm)
        assert isinstance(net[1]["inner"], SyncBatchNorm)  # type: ignore[index]
        assert net[0].weight is weight
        again = SyncBatchNorm.convert_sync_batchnorm(net)
        assert again[0] is net[0]  # type: ignore[index]
        SyncBatchNorm.revert_sync_batchnorm(net)
        assert not isinstance(net[0], SyncBatchNorm)
        assert net[0].weight is weight
        net[0](torch.ones(2, 2))

    run_ranks(1, program)


def test_inputs_that_do_not_fit() -> None:
    def program(rank: int) -> None:
        with pytest.raises(ValueError, match=r"expected at least 2D input \(got 1D input\)"):
            SyncBatchNorm(3)(torch.ones(3))
        with pytest.raises(ValueError, match=r"of 3 channels got an input of shape \[2, 4\]"):
            SyncBatchNorm(3)(torch.ones(2, 4))

    run_ranks(1, program)


def test_channels_may_have_no_bias() -> None:
    def program(rank: int) -> None:
        layer = SyncBatchNorm(2, bias=False)
        assert layer.bias is None
        assert layer(torch.ones(4, 2)).abs().max() == 0
        plain = torch.nn.BatchNorm1d(2)
        plain.register_parameter("bias", None)
        converted = SyncBatchNorm.convert_sync_batchnorm(plain)
        assert list(dict(converted.named_parameters())) == ["weight"]

    run_ranks(2, program)


def test_a_frozen_layer_of_plain_inputs_has_no_graph() -> None:
    def program(rank: int) -> list[bool]:
        layer = SyncBatchNorm(2).requires_grad_(False)
        # Where one rank alone has inputs in a graph, all take part in backward.
        inputs = torch.ones(3, 2), torch.ones(3, 2, requires_grad=rank == 0)
        return [layer(each).requires_grad for each in inputs]

    assert run_ranks(2, program) == [[False, True]] * 2


def test_torchs_layer_is_refused_until_it_is_converted() -> None:
    class Own(nn.SyncBatchNorm):
        pass

    def program(rank: int) -> None:
        model: Any = nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3))
        for wrap in (DistributedDataParallel, fully_shard):
            with pytest.raises(TypeError, match="1 is torch's SyncBatchNorm"):
                wrap(copy.deepcopy(model))
        DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(model))
        with pytest.raises(TypeError, match="does not call super"):
            SyncBatchNorm.convert_sync_batchnorm(Own(3))

    run_ranks(2, program)
