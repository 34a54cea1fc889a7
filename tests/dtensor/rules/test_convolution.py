"""Convolutions, pooling and resampling on parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.dtensor.op_checks import check_op, count_op
from tests.tables import each
from tilework.dtensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from tilework.layout import Placement
from tilework.testing import run_ranks

FEW: dict[str, Any] = {"meshes": [(2,), (2, 2)], "most": 4, "gathers": False}


def randn(*shape: int, seed: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@each("dims", [1, 2, 3])
def test_convolution(dims: int) -> None:
    convolve = getattr(F, f"conv{dims}d")
    x, bias = randn(3, 4, *(6, 4, 3)[:dims]), randn(6)
    weight = randn(6, 4, *(3, 2, 2)[:dims])
    check_op(lambda x, w, b: convolve(x, w, b, padding=1, stride=2), x, weight, bias, **FEW)
    check_op(convolve, x[0], weight, None, **FEW)


@pytest.mark.parametrize("groups", [2, 4])
def test_groups(groups: int) -> None:
    x, weight, bias = randn(2, 4, 5), randn(8, 4 // groups, 3), randn(8)
    check_op(lambda x, w, b: F.conv1d(x, w, b, groups=groups), x, weight, bias, **FEW)
    back = randn(4, 2, 3)
    check_op(
        lambda x, w, b: F.conv_transpose1d(x, w, b, groups=groups),
        *(x, back, randn(2 * groups)),
        **FEW,
    )


@each("dims", [1, 2, 3])
def test_transposed_convolution(dims: int) -> None:
    convolve = getattr(F, f"conv_transpose{dims}d")
    x, weight, bias = randn(2, 4, *(3, 4, 2)[:dims]), randn(4, 3, *(3, 2, 2)[:dims]), randn(3)
    check_op(
        lambda x, w, b: convolve(x, w, b, stride=2, padding=1, output_padding=1),
        *(x, weight, bias),
        **FEW,
    )


def test_padding_by_name() -> None:
    for padding in ("same", "valid"):
        check_op(
            lambda x, w, padding=padding: F.conv2d(x, w, padding=padding),
            *(randn(2, 3, 4, 4), randn(2, 3, 3, 3)),
            **FEW,
        )


def test_patches_cut_in_space_stay_where_they_are() -> None:
    x, weight = randn(2, 3, 8, 6), randn(4, 3, 2, 2)
    layouts: Sequence[Sequence[Any]] = [[Shard(2)], [Replicate()]]
    for operate in (
        lambda x, w: F.conv2d(x, w, stride=2),
        lambda x, w: F.max_pool2d(x, 2) + w.sum(),
        lambda x, w: F.avg_pool2d(x, 2) + w.sum(),
    ):
        seen = count_op(operate, x, weight, layouts=layouts)
        assert seen.forward == []
        assert seen.placements == [(Shard(2),)]
    back = count_op(
        lambda x, w: F.conv_transpose2d(x, w.transpose(0, 1), stride=2),
        *(x, weight),
        layouts=layouts,
    )
    assert back.forward == []
    assert back.placements == [(Shard(2),)]
    check_op(lambda x, w: F.conv2d(x, w, stride=2), x, weight, **FEW)
    check_op(lambda x: F.max_pool2d(x, 2), x, **FEW)


def test_channels_are_cut_without_gathering() -> None:
    x, weight, bias = randn(2, 4, 5), randn(6, 4, 3), randn(6)
    inner = count_op(F.conv1d, x, weight, bias, layouts=[[Shard(1)], [Shard(1)], [Replicate()]])
    assert inner.forward == []
    assert inner.placements == [(Partial(),)]
    outer = count_op(F.conv1d, x, weight, bias, layouts=[[Replicate()], [Shard(0)], [Shard(0)]])
    assert outer.forward == []
    assert outer.placements == [(Shard(1),)]


POOLS: dict[str, Callable[[Tensor], Any]] = {
    "max1": lambda x: F.max_pool1d(x.flatten(2), 3, 2),
    "max2": lambda x: F.max_pool2d(x, 3, 2, padding=1),
    "max2 places": lambda x: F.max_pool2d(x, 2, return_indices=True),
    "max3": lambda x: F.max_pool3d(x.unsqueeze(2), (1, 2, 2), ceil_mode=True),
    "avg1": lambda x: F.avg_pool1d(x.flatten(2), 3),
    "avg2": lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
    "avg3": lambda x: F.avg_pool3d(x.unsqueeze(2), (1, 2, 3)),
    "lp2": lambda x: F.lp_pool2d(x.abs() + 1, 2.0, 2),
    "adaptive avg": lambda x: F.adaptive_avg_pool2d(x, (2, None)),
    "adaptive max": lambda x: F.adaptive_max_pool2d(x, 3),
    "adaptive max places": lambda x: F.adaptive_max_pool1d(x.flatten(2), 3, return_indices=True),
    "unpool": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), [2, 2]),
    "unfold": lambda x: F.unfold(x, (2, 3), padding=1),
    "fold": lambda x: F.fold(x.flatten(2), (5, 7), 2),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "bilinear": lambda x: F.interpolate(x, size=(3, 5), mode="bilinear", align_corners=True),
    "bicubic": lambda x: F.interpolate(x, size=7, mode="bicubic", antialias=True),
    "local response": lambda x: F.local_response_norm(x.abs(), 2),
}


@each("name", POOLS)
def test_pooling_and_resampling(name: str) -> None:
    check_op(POOLS[name], randn(4, 4, 4, 6), meshes=[(3,), (2, 2)], most=4, gathers=False)


def test_shuffling_pixels() -> None:
    check_op(lambda x: F.pixel_shuffle(x, 2), randn(2, 8, 3, 2), **FEW)
    check_op(lambda x: F.pixel_unshuffle(x, 2), randn(2, 3, 4, 6), **FEW)
    check_op(lambda x: F.channel_shuffle(x, 2), randn(2, 4, 3, 2), **FEW)


@each("shape", [(0, 4, 2, 4), (2, 0, 2, 4), (2, 4, 0, 4)])
def test_shuffling_no_pixels(shape: tuple[int, ...]) -> None:
    """torch gives some of them other shapes than it gives pixels."""
    check_op(lambda x: F.pixel_unshuffle(x, 2), torch.zeros(shape), **FEW)
    check_op(lambda x: F.pixel_shuffle(x, 2), torch.zeros(shape[0], 4, *shape[2:]), **FEW)


def test_sampling_at_a_grid() -> None:
    check_op(
        lambda x, grid: F.grid_sample(x, grid, align_corners=False),
        *(randn(2, 3, 4, 4), randn(2, 3, 5, 2).clamp(-0.9, 0.9)),
        **FEW,
    )
    check_op(
        lambda theta: F.affine_grid(theta, [3, 2, 4, 5], align_corners=False), randn(3, 2, 3), **FEW
    )


def test_more_ranks_than_channels() -> None:
    three = {**FEW, "meshes": [(3,)]}
    check_op(F.conv1d, randn(2, 2, 5), randn(2, 2, 3), randn(2), **three)
    check_op(lambda x: F.max_pool1d(x, 2), randn(2, 2, 5), **three)
    check_op(
        lambda x, w: F.conv_transpose2d(x, w, output_padding=1),
        *(torch.zeros(0, 2, 4, 3), randn(2, 3, 2, 2)),
        **three,
    )


@each("placement", [Shard(0), Shard(1), Replicate()])
@each(
    ("convolve", "shape", "weight"),
    [
        (F.conv1d, (3, 4), (1, 1, 1)),
        (F.conv1d, (2, 4, 5), (1, 2, 1)),
        (F.conv1d, (2, 2, 5), (1, 1, 1)),
        (F.conv2d, (3, 4, 4), (1, 1, 1, 1)),
        (F.conv_transpose1d, (3, 4), (1, 1, 1)),
        (F.conv_transpose2d, (2, 4, 3, 3), (2, 1, 1, 1)),
    ],
)
def test_channels_that_do_not_fit(
    convolve: Callable[..., Tensor],
    shape: Sequence[int],
    weight: Sequence[int],
    placement: Placement,
) -> None:
    """Also where some ranks' parts do: one row of three fits a weight for one channel."""

    def program(rank: int) -> None:
        x = distribute_tensor(randn(*shape), init_device_mesh("cpu", (2,)), [placement])
        with pytest.raises(RuntimeError, match="Given "):
            convolve(x, randn(*weight))

    with pytest.raises(RuntimeError, match="Given "):
        convolve(randn(*shape), randn(*weight))
    run_ranks(2, program)
