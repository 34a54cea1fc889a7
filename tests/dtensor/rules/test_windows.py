"""Convolutions and pools along sharded dims: values, gradients, and the bytes of the halos."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.dtensor.sharded_values import cut, full, same
from tests.layout.random_tilings import examples
from tests.rounding import assert_close
from tilework.dtensor import Placement, Replicate, Shard
from tilework.dtensor.debug.causes import explain
from tilework.mesh import init_device_mesh
from tilework.testing import run_ranks

Function = Callable[..., Tensor]


def agree(
    function: Function, tensors: list[Tensor], mesh: tuple[int, ...], placements: list[Placement]
) -> list[list[Any]]:
    """Compare a call, whose first tensor is laid out so, and gradients; the events of each rank."""
    plain = [x.clone().requires_grad_(x.is_floating_point()) for x in tensors]
    want = function(*plain)
    cotangent = torch.randn_like(want) if want.is_floating_point() else None
    if cotangent is not None:
        want.backward(cotangent)  # type: ignore[no-untyped-call]

    def rank(rank: int) -> list[Any]:
        on = init_device_mesh("cpu", mesh)
        whole: list[Placement] = [Replicate()] * len(mesh)
        own = [cut(x, on, whole if number else placements) for number, x in enumerate(tensors)]
        for x in own:
            x.requires_grad_(x.is_floating_point())
        with explain() as log:
            out: Any = function(*own)
        same(out, want)
        if cotangent is not None:
            out.backward(cut(cotangent, on, whole))
            for x, known in zip(own, plain, strict=True):
                assert x.grad.placements == x.placements
                assert_close(full(x.grad), known.grad)
        return log.events

    return run_ranks(torch.Size(mesh).numel(), rank)


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[Function, list[Tensor]]:
    spatial = draw(st.integers(1, 2))
    kernel = [draw(st.integers(1, 3)) for _ in range(spatial)]
    dilation = [draw(st.integers(1, 2)) for _ in range(spatial)]
    sizes = [d * (k - 1) + draw(st.integers(1, 5)) for k, d in zip(kernel, dilation, strict=True)]
    groups = draw(st.sampled_from([1, 2]))
    options: dict[str, Any] = {
        "stride": [draw(st.integers(1, 3)) for _ in range(spatial)],
        "padding": [draw(st.integers(0, 2)) for _ in range(spatial)],
        "dilation": dilation,
        "groups": groups,
    }
    name, shape = f"conv{spatial}d", (4, 2 // groups, *kernel)
    if draw(st.booleans()):
        name, shape = f"conv_transpose{spatial}d", (2, 4 // groups, *kernel)
        options["padding"] = 0
        options["output_padding"] = [s - 1 for s in options["stride"]]
        options["stride"] = [max(s, 2) for s in options["stride"]]
    torch.manual_seed(0)
    tensors = [torch.randn(2, 2, *sizes), torch.randn(shape), torch.randn(4)]
    function = getattr(F, name)
    return lambda x, w, b: function(x, w, b, **options), [x.double() for x in tensors]


@examples()
@given(st.data())
def test_convolutions(data: st.DataObject) -> None:
    function, tensors = data.draw(convolutions())
    mesh = data.draw(st.sampled_from([(2,), (3,), (2, 2)]))
    dims = range(tensors[0].ndim)
    ways = [Shard(dim, turns=turns) for dim in dims for turns in (1, 2)]
    agree(function, tensors, mesh, [data.draw(st.sampled_from(ways)) for _ in mesh])


@st.composite
def pools(draw: st.DrawFn) -> Function:
    kernel, stride = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    padding, ceil = draw(st.integers(0, kernel // 2)), draw(st.booleans())
    counted, dilation = draw(st.booleans()), draw(st.integers(1, 2))
    kinds: list[Function] = [
        lambda x: F.max_pool2d(x, kernel, stride, padding, dilation, ceil),
        lambda x: F.max_pool2d(x, kernel, stride, padding, dilation, ceil, return_indices=True)[0],
        lambda x: F.max_pool2d(x, kernel, stride, padding, dilation, ceil, return_indices=True)[1],
        lambda x: F.avg_pool2d(x, kernel, stride, padding, ceil, counted),
        lambda x: F.avg_pool2d(x, kernel, stride, padding, ceil, counted, 3),
        lambda x: F.adaptive_avg_pool2d(x, (kernel, None)),
        lambda x: F.adaptive_max_pool2d(x, kernel),
        lambda x: F.lp_pool2d(x, 2, kernel, stride, ceil),
    ]
    return draw(st.sampled_from(kinds))


@examples()
@given(st.data())
def test_pools(data: st.DataObject) -> None:
    torch.manual_seed(0)
    x = torch.rand(2, 2, data.draw(st.integers(7, 9)), 8, dtype=torch.float64)
    placement = Shard(data.draw(st.integers(0, 3)), turns=data.draw(st.integers(1, 2)))
    length = data.draw(st.integers(2, 4))
    agree(data.draw(pools()), [x], (length,), [placement])


def test_a_halo_moves_and_nothing_else() -> None:
    x, w, b = torch.randn(2, 3, 12, 6), torch.randn(5, 3, 3, 3), torch.randn(5)
    events = agree(lambda x, w, b: F.conv2d(x, w, b, padding=1), [x, w, b], (3,), [Shard(2)])
    # The middle rank gets a row of each neighbour: two images, three channels, six columns.
    assert [(event.collective, event.nbytes) for event in events[0]] == [
        ("all_to_all", 2 * (2 * 3 * 6) * 4)
    ]


def test_wide_strides_move_nothing() -> None:
    events = agree(lambda x: F.max_pool1d(x, 2, 4), [torch.randn(2, 3, 16)], (2,), [Shard(2)])
    assert not events[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype: torch.dtype) -> None:
    x, w = torch.randn(2, 3, 9).to(dtype), torch.randn(4, 3, 3).to(dtype)
    agree(lambda x, w: F.conv1d(x, w, padding="same"), [x, w], (2,), [Shard(2)])
    if dtype is not torch.float16:  # for which torch has no pools on CPUs
        agree(lambda x: F.avg_pool1d(x, 3, 2, 1, True, False), [x], (2,), [Shard(2)])


@pytest.mark.parametrize("rows", [1, 2])
def test_ranks_without_rows(rows: int) -> None:
    x, w = torch.randn(2, 3, rows), torch.randn(4, 3, 3)
    agree(lambda x, w: F.conv1d(x, w, padding=2), [x, w], (4,), [Shard(2)])


def test_channels_stay_sharded_beside_a_sharded_image() -> None:
    x, w = torch.randn(2, 4, 8), torch.randn(6, 4, 3)
    agree(lambda x, w: F.conv1d(x, w, padding=1), [x, w], (2, 2), [Shard(2), Shard(1)])


def test_gradients_of_gradients() -> None:
    def penalty(x: Tensor, w: Tensor) -> Tensor:
        loss = F.conv1d(x, w, padding=1).square().sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return grad.square().sum()

    tensors = [torch.randn(1, 2, 6, dtype=torch.float64), torch.randn(2, 2, 3, dtype=torch.float64)]
    agree(penalty, tensors, (2,), [Shard(2)])


def test_the_gradient_of_a_window_of_infinities_meets_an_element_and_no_padding() -> None:
    x = torch.full((1, 2, 8), -torch.inf)
    agree(lambda x: F.max_pool1d(x, 3, 2, 1), [x], (2,), [Shard(2)])


def test_ranks_whose_windows_lie_beyond_the_end() -> None:
    agree(lambda x: F.avg_pool1d(x, 2, 3, 0, True), [torch.randn(2, 2, 3)], (4,), [Shard(2)])
