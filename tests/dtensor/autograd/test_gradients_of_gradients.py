"""Gradients of gradients, where ranks have little of a tensor or nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.dtensor.op_checks import (
    Layout,
    describe,
    distributed,
    noting_gatherings,
    skipping_without_derivatives,
)
from tests.fuzz.language import values
from tests.rounding import assert_close
from tests.tables import each
from tilework.dtensor import DTensor
from tilework.layout import Partial, Placement, Replicate, Shard
from tilework.mesh import init_device_mesh
from tilework.testing import run_ranks

#: Operators, and the shapes of what they take.
OPERATORS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "cumprod": (lambda x: x.cumprod(0), [(4, 2)]),
    "cumprod of few": (lambda x: x.cumprod(0), [(2, 2)]),
    "cumsum": (lambda x: x.square().cumsum(0), [(2, 2)]),
    "prod": (lambda x: x.prod(0), [(4, 2)]),
    "logcumsumexp": (lambda x: x.logcumsumexp(0), [(4, 2)]),
    "conv1d": (functional.conv1d, [(2, 3, 5), (4, 3, 2), (4,)]),
    "conv1d without a bias": (functional.conv1d, [(2, 3, 5), (2, 3, 2)]),
    "conv2d": (functional.conv2d, [(2, 1, 4, 4), (2, 1, 2, 2), (2,)]),
    "conv1d of groups": (
        lambda x, w, b: functional.conv1d(x, w, b, groups=2),
        [(2, 4, 5), (4, 2, 2), (4,)],
    ),
    "conv_transpose1d": (functional.conv_transpose1d, [(2, 3, 5), (3, 2, 2), (2,)]),
    "group_norm": (lambda x, w, b: functional.group_norm(x, 2, w, b), [(2, 4, 3), (4,), (4,)]),
    "group_norm alone": (lambda x: functional.group_norm(x, 2), [(2, 4, 3)]),
    "instance_norm": (
        lambda x, w, b: functional.instance_norm(x, weight=w, bias=b),
        [(2, 2, 4), (2,), (2,)],
    ),
    "local_response_norm": (lambda x: functional.local_response_norm(x, 2), [(2, 3, 4)]),
    "layer_norm": (lambda x, w, b: functional.layer_norm(x, (3,), w, b), [(2, 3), (3,), (3,)]),
    "batch_norm": (
        lambda x, w, b: functional.batch_norm(x, None, None, w, b, training=True),
        [(4, 2, 3), (2,), (2,)],
    ),
    "layer_norm over one dim": (
        lambda x, w, b: functional.layer_norm(x, (3,), w, b).exp(),
        [(2, 3), (3,), (3,)],
    ),
    "batch_norm of known statistics": (
        lambda x, w: functional.batch_norm(
            x, torch.ones(2).to(torch.float64), torch.ones(2).to(torch.float64), w
        ).exp(),
        [(2, 2, 2), (2,)],
    ),
    "batch_norm with weights that are given": (
        lambda x: functional.batch_norm(
            x, None, None, torch.full((2,), 3.0).to(x.dtype), None, True
        ),
        [(4, 2, 3)],
    ),
    "linear": (functional.linear, [(2, 3), (2, 3), (2,)]),
    "bilinear": (functional.bilinear, [(2, 3), (2, 2), (4, 3, 2), (4,)]),
    "attention": (
        lambda q: functional.softmax(q @ q.mT, -1) @ q,
        [(2, 3, 2)],
    ),
    "softmax": (lambda x: functional.softmax(x, 0), [(2, 3)]),
    "cross_entropy": (
        lambda x: functional.cross_entropy(x, torch.tensor([0, 2]), reduction="none"),
        [(2, 3)],
    ),
    "pooling": (lambda x: functional.avg_pool1d(x.square(), 2), [(2, 2, 4)]),
    "max_pool": (lambda x: functional.max_pool1d(x.square(), 2), [(2, 2, 4)]),
    "max_pool alone": (lambda x: functional.max_pool1d(x, 2), [(2, 2, 4)]),
    "lp_pool": (lambda x: functional.lp_pool1d(x, 2, 2), [(2, 2, 4)]),
    "adaptive_max_pool": (lambda x: functional.adaptive_max_pool2d(x, 2).exp(), [(2, 2, 4, 4)]),
    "interpolate": (lambda x: functional.interpolate(x.square(), scale_factor=2), [(2, 2, 3)]),
    "gather": (lambda x: x.square().gather(0, torch.tensor([[1, 0]])), [(2, 2)]),
    "index": (lambda x: x.square()[torch.tensor([1, 1, 0])].exp(), [(2, 2)]),
    "embedding": (
        lambda x: functional.embedding(torch.tensor([1, 1, 0]), x).exp(),
        [(2, 3)],
    ),
    "norm": (lambda x: x.norm(dim=0), [(2, 3)]),
    "var": (lambda x: x.var(0), [(2, 3)]),
    "max": (lambda x: x.square().max(0)[0], [(2, 3)]),
    "amax": (lambda x, y: x.square().amax(0) * y, [(4, 3), (3,)]),
    "max along one dim": (lambda x, y: x.square().max(0)[0] * y, [(4, 3), (3,)]),
    "sort": (lambda x: x.square().sort(0)[0], [(2, 3)]),
    "pad": (lambda x: functional.pad(x.square(), (0, 0, 1, 1)), [(2, 3)]),
    "cat": (lambda x, y: torch.cat([x * y, y * y]), [(2, 3), (2, 3)]),
    "pad of one dim": (lambda x: functional.pad(x.square(), (1, 1)), [(2,)]),
    "reflecting pad": (
        lambda x: functional.pad(x.square(), (1, 1), mode="reflect"),
        [(2, 1, 3)],
    ),
    "scatter_reduce": (
        lambda x, y: x.exp().scatter_reduce(0, torch.tensor([1]), y, "mean"),
        [(2,), (1,)],
    ),
    "det": (lambda a: torch.linalg.det(a).square(), [(2, 2, 2)]),
    "solve": (lambda a: torch.linalg.inv(a + 9 * torch.eye(2)), [(2, 2, 2)]),
    "quantile": (lambda x: x.square().quantile(0.3, 0), [(2, 3)]),
    "fft": (lambda x: torch.fft.rfft(x * x).abs(), [(2, 4)]),
    "unfold": (lambda x: functional.unfold(x * x, 2), [(2, 1, 3, 3)]),
    "grid_sample": (
        lambda x, g: functional.interpolate(x * x, size=3) * g,
        [(2, 1, 2, 2), (2, 1, 3, 3)],
    ),
    "grid_sample itself": (
        lambda x, g: functional.grid_sample(x, g, align_corners=True),
        [(2, 1, 3, 3), (2, 2, 2, 2)],
    ),
}


def _twice(operator: Callable[..., Tensor], leaves: list[Any]) -> list[Tensor | None]:
    """Gradients, and those of their squares."""
    result = operator(*leaves)
    grads = torch.autograd.grad(result.sum(), leaves, create_graph=True)
    total = sum(grad.square().sum() for grad in grads)
    assert isinstance(total, Tensor)
    if total.requires_grad:
        total.backward()  # type: ignore[no-untyped-call]
    return [_full(each) for each in (*grads, *(leaf.grad for leaf in leaves))]


def _full(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _layouts(shapes: list[tuple[int, ...]]) -> list[list[Layout]]:
    """Each input sharded along each of its dims, beside others that are sharded, too, or whole."""
    choices: list[list[Placement]] = [
        [Replicate(), *(Shard(dim) for dim in range(len(shape)))] for shape in shapes
    ]
    found = [[Layout((each,)) for each in combined] for combined in itertools.product(*choices)]
    partial = [Layout((Partial(),))] * len(shapes)
    return [*found[:: max(1, len(found) // 5)], partial]


@each("name", OPERATORS)
def test_they_are_those_of_plain_tensors(name: str) -> None:
    operator, shapes = OPERATORS[name]
    inputs = [values(shape, number) for number, shape in enumerate(shapes)]
    with skipping_without_derivatives():
        expected = _twice(operator, [each.clone().requires_grad_() for each in inputs])

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (3,))
        for layouts in _layouts(shapes):
            leaves = [
                distributed(whole, mesh, layout).requires_grad_()
                for whole, layout in zip(inputs, layouts, strict=True)
            ]
            for got, want in zip(_twice(operator, leaves), expected, strict=True):
                text = f"{name}: {describe(layouts)}: "
                assert (got is None) == (want is None), f"{text}{got}, plain gives {want}"
                if want is not None:
                    assert_close(got, want, msg=text.__add__)

    with noting_gatherings():
        run_ranks(3, program)


#: Views of what each rank has little of.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view_as": lambda x: x.view_as(x),
    "slice": lambda x: x[:1],
    "transpose": lambda x: x.t(),
    "expand": lambda x: x.expand(2, *x.shape),
    "view of a view": lambda x: x[None].squeeze(0).t()[:1],
}


@each("name", VIEWS)
def test_views_of_a_leaf_that_was_written_to_keep_their_graph_on_each_rank(name: str) -> None:
    def run(leaf: Tensor) -> list[Tensor | None]:
        view = VIEWS[name](leaf)
        with torch.no_grad():
            leaf.mul_(2)
        (grad,) = torch.autograd.grad((view * view).sum(), leaf, create_graph=True)
        assert grad.requires_grad
        (second,) = torch.autograd.grad(grad.square().sum(), leaf)
        return [_full(grad), _full(second)]

    whole = values((3, 1), 0)
    expected = run(whole.clone().requires_grad_())

    def program(rank: int, dim: int) -> None:
        mesh = init_device_mesh("cpu", (4,))
        leaf = distributed(whole, mesh, Layout((Shard(dim),))).requires_grad_()
        for got, want in zip(run(leaf), expected, strict=True):
            assert_close(got, want)

    for dim in (0, 1):
        run_ranks(4, program, dim)


#: Views that are written to, each of elements that some ranks have nothing of.
WRITTEN: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x[:1],
    "part of another shape": lambda x: x.view(2, 4)[:, 1:3],
    "flat": lambda x: x.flatten(),
}


@each("name", WRITTEN)
@each("shape", [(4,), (2, 2)])
def test_writes_to_views_keep_the_graph_on_each_rank(name: str, shape: tuple[int, ...]) -> None:
    def run(leaf: Tensor) -> list[Tensor | None]:
        x = leaf * 1
        view = WRITTEN[name](x).mul_(leaf.sum())
        (grad,) = torch.autograd.grad((x**3).sum() + (view**3).sum(), leaf, create_graph=True)
        return [_full(grad), _full(torch.autograd.grad(grad.square().sum(), leaf)[0])]

    whole = values((4, 2), 0)
    expected = run(whole.clone().requires_grad_())

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", shape)
        for dim in (0, 1):
            layout = Layout((Shard(dim),) * len(shape))
            leaf = distributed(whole, mesh, layout).requires_grad_()
            for got, want in zip(run(leaf), expected, strict=True):
                assert_close(got, want)

    run_ranks(4, program)
