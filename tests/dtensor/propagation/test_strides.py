"""Strides of results are those that torch gives plain tensors."""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections.abc import Callable

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from tests.tables import each
from tilework.dtensor import GatherWarning, Replicate, Shard, distribute_tensor, init_device_mesh
from tilework.dtensor.propagation.strides import elementwise_strides, like_strides
from tilework.layout import Placement
from tilework.testing import run_ranks

SIZES = st.sampled_from([1, 2, 3])
X64 = torch.zeros(1, dtype=torch.float64)


@st.composite
def operands(draw: st.DrawFn) -> list[Tensor]:
    """Tensors that broadcast together, some of them permuted, expanded or sliced."""
    shape = draw(st.lists(SIZES, max_size=4))
    tensors = []
    for _ in range(draw(st.integers(1, 3))):
        own = [draw(st.sampled_from([size, size, 1])) for size in shape]
        order = draw(st.permutations(range(len(own))))
        step = draw(st.sampled_from([1, 1, 2]))
        memory = torch.zeros([own[dim] * step for dim in order])
        tensor = memory.permute([order.index(dim) for dim in range(len(order))])
        tensor = tensor[tuple([slice(None, None, step)] * len(own))]
        if draw(st.booleans()):
            tensor = tensor.expand(shape)
        dropped = draw(st.integers(0, len(own)))
        while dropped and tensor.dim() and tensor.shape[0] == 1:
            tensor, dropped = tensor[0], dropped - 1
        tensors.append(tensor)
    return tensors


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A shape and strides, of dims in any order, in steps, empty or of one element."""
    shape = draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))
    strides, step = [0] * len(shape), 1
    for dim in draw(st.permutations(range(len(shape)))):
        strides[dim] = step * draw(st.sampled_from([1, 1, 1, 2]))
        step = strides[dim] * max(shape[dim], 1)
    for dim in range(len(shape)):
        if draw(st.integers(0, 6)) == 0:
            strides[dim] = draw(st.integers(0, 5))
    return tuple(shape), tuple(strides)


@given(layouts())
def test_strides_of_what_is_like_another_are_torch_s(
    layout: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    shape, strides = layout
    formats = [torch.preserve_format, torch.contiguous_format]
    formats += {4: [torch.channels_last], 5: [torch.channels_last_3d]}.get(len(shape), [])
    for memory_format in formats:
        like = torch.empty_like(torch.empty_strided(*layout), memory_format=memory_format)
        assert like_strides(shape, strides, memory_format) == like.stride()


@given(operands())
def test_elementwise_strides_are_torch_s(tensors: list[Tensor]) -> None:
    every = [(tuple(t.shape), tuple(t.stride())) for t in tensors]
    for result, its in (
        (tensors[0].exp(), every[:1]),
        (tensors[0] * 1, [every[0], ((), ())]),
        (tensors[0] + tensors[-1], [every[0], every[-1]]),
        (torch.addcmul(*tensors), every) if len(tensors) == 3 else (tensors[0].exp(), every[:1]),
    ):
        assert elementwise_strides(tuple(result.shape), its) == result.stride()


@each(
    "operator",
    [
        torch.linalg.inv,
        torch.linalg.cholesky,
        lambda x: torch.linalg.qr(x)[1],
        lambda x: torch.fft.fft(x, dim=0),
        lambda x: torch.transpose_copy(x, 0, 1),
        lambda x: torch.diagonal_copy(x.view(2, 2, 4)),
        torch.t_copy,
        lambda x: torch.svd(x)[2],
        lambda x: torch.fft.irfft2(x[:, :0], s=(2, 3)),
    ],
)
def test_results_that_lie_otherwise_than_in_rows(operator: Callable[[Tensor], Tensor]) -> None:
    full = 4 * torch.eye(4) + 1

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        result = operator(distribute_tensor(full, mesh, [Shard(1)]))
        assert result.stride() == operator(full).stride()

    run_ranks(2, program)


QUERIES = torch.arange(4.0 * 6 * 2 * 4).sin().reshape(4, 6, 2, 4)


@each(
    "operator",
    [
        lambda x: F.scaled_dot_product_attention(x, x, x),
        lambda x: F.scaled_dot_product_attention(x, x[:, :1], x[:, :1], enable_gqa=True),
        lambda x: F.scaled_dot_product_attention(x, x, x, torch.ones(4, 1, 6, 6)),
        lambda x: F.scaled_dot_product_attention(x, x, x, torch.ones(2, 6, 6)),
        lambda x: F.scaled_dot_product_attention(x, x, x[..., :3]),
        lambda x: F.scaled_dot_product_attention(*(x[..., :0],) * 3),
        lambda x: F.scaled_dot_product_attention(*(x[..., ::2],) * 3),
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
        lambda x: F.scaled_dot_product_attention(*(x[:, 0],) * 3),
        lambda x: torch.quantile(x, torch.tensor([0.2, 0.5]), -1),
        lambda x: torch.nanquantile(x, 0.2, 1, keepdim=True),
    ],
)
@each("placement", [Replicate(), Shard(0), Shard(1), Shard(2)])
def test_of_attention_and_quantiles(
    operator: Callable[[Tensor], Tensor], placement: Placement
) -> None:
    """Users merge heads by ``.transpose(1, 2).view(...)``, which needs torch's strides."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        result = operator(distribute_tensor(QUERIES, mesh, [placement]).transpose(1, 2))
        expected = operator(QUERIES.transpose(1, 2))
        assert result.stride() == expected.stride()
        if result.dim() == 4 and expected.transpose(1, 2).is_contiguous():
            result.transpose(1, 2).view(4, 6, -1)

    run_ranks(2, program)


@each(("kind", "batch_first"), [(nn.LSTM, False), (nn.LSTM, True), (nn.GRU, True), (nn.RNN, False)])
def test_of_recurrent_layers(kind: type[nn.Module], batch_first: bool) -> None:
    layer: nn.Module = kind(
        3, 4, num_layers=2, dropout=0.5, batch_first=batch_first, bidirectional=True
    )
    full = torch.ones(2, 3, 3)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        placements: tuple[Placement, ...] = (Replicate(), Shard(0), Shard(1))
        for train, placement in itertools.product((False, True), placements):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", GatherWarning)
                x = distribute_tensor(full, mesh, [placement])
                found = copy.deepcopy(layer).train(train)(x)
            expected = copy.deepcopy(layer).train(train)(full)
            for result, plain in zip(tree_leaves(found), tree_leaves(expected), strict=True):
                assert result.stride() == plain.stride(), (train, placement)

    run_ranks(2, program)


_IMAGES = torch.randn(2, 6, 4, 8)


@each(
    "view",
    [
        lambda x: x.transpose(2, 3),
        lambda x: x.permute(3, 2, 1, 0),
        lambda x: x[..., ::2].transpose(0, 3),
        lambda x: x[0, 0].t(),
        lambda x: x[0, 0].expand(3, 4, 8),
        lambda x: x.contiguous(memory_format=torch.channels_last),
    ],
)
@each(("n", "placement"), [(1, Shard(1)), (2, Replicate()), (2, Shard(1))])
def test_of_cropping_and_of_complex_angles(
    view: Callable[[Tensor], Tensor], n: int, placement: Placement
) -> None:
    """Of what is not contiguous, a crop is copied as it lies, and angles are in rows."""
    widths = [(0, 0), (-1, -1), (-1, 0, -1, 0), (1, -1), (-1, -1, 1, 0), (1, 1), (-1, -1, 0, 0)]
    operators: list[Callable[[Tensor], Tensor]] = [
        *(functools.partial(F.pad, pad=each) for each in widths),
        lambda x: torch.angle(x + 1j),
        lambda x: (x + 1j).angle(),
        *(lambda x, of=of: of(x + 1j) for of in (torch.abs, torch.sgn, torch.exp, torch.conj)),
        torch.angle,
    ]

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (n,))
        for number, operator in enumerate(operators):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", GatherWarning)
                result = operator(view(distribute_tensor(_IMAGES, mesh, [placement])))
            expected = operator(view(_IMAGES))
            assert result.shape == expected.shape
            assert result.stride() == expected.stride(), number

    run_ranks(n, program)


@each("call", [lambda x: x.type_as(X64), F.logsigmoid, F.softplus])
@each("lies", [lambda x: x.t(), lambda x: x[:, ::2], lambda x: x.t()[1:], lambda x: x[:, None, :]])
def test_of_what_lies_otherwise_than_in_rows(
    call: Callable[[Tensor], Tensor], lies: Callable[[Tensor], Tensor]
) -> None:
    expected = call(lies(torch.rand(4, 6)))

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for placement in (Replicate(), Shard(0), Shard(1)):
            x = lies(distribute_tensor(torch.rand(4, 6), mesh, [placement]))
            assert call(x).stride() == expected.stride()

    run_ranks(2, program)
