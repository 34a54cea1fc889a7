"""Functional collectives on CUDA tensors: values, gradients, traces, compilers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tilework.distributed.functional as functional
import tilework.distributed.nn.functional as nn_functional
from tests.comm.functional import reference
from tests.gpu.world import (
    ONE,
    TWO,
    Checks,
    Place,
    World,
    close,
    in_worlds,
    on_device,
    require_device,
    run_checks,
    same,
)

require_device()
CHECKS = Checks()


@in_worlds(ONE, TWO)
def test_functional(world: World, tmp_path: Path) -> None:
    run_checks(__name__, world, tmp_path)


def every(n: int) -> tuple[reference.Case, ...]:
    """The collectives of the tests on the CPU, on so many ranks: sizes as torch's engines have."""
    sizes, shape = [3] * n, (4 * n, 6)
    return (
        *(reference.all_reduce(n, shape, op) for op in ("sum", "avg", "max", "product")),
        reference.reduce(n, shape, "sum", 0),
        reference.broadcast(n, shape, 0),
        reference.all_gather(n, shape, 0, None),
        reference.all_gather(n, shape, 1, sizes),
        reference.gather(n, shape, 0, sizes, n - 1),
        reference.scatter(n, shape, 0, sizes, 0),
        reference.reduce_scatter(n, shape, 0, [4] * n, "sum"),
        reference.reduce_scatter(n, shape, 1, sizes, "avg"),
        reference.all_to_all(n, shape, [[*range(1, n + 1)]] * n),
        reference.permute(n, shape, [(rank + 1) % n for rank in range(n)]),
    )


def inputs(case: reference.Case, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Each rank's tensor: small whole numbers."""
    return [
        (torch.arange(torch.Size(shape).numel()).reshape(shape) * (rank + 2) % 5 - 1).to(dtype)
        for rank, shape in enumerate(case.shapes)
    ]


@CHECKS(*range(len(every(1))))
def values_and_gradients(place: Place, number: int) -> None:
    """Those of all ranks at once on the CPU; of other layouts and dtypes the values."""
    case = every(place.size)[number]
    xs = [x.requires_grad_() for x in inputs(case)]
    ys = case.model(xs)
    weights = [torch.arange(float(y.numel())).view(y.shape) for y in ys]
    torch.autograd.backward(ys, weights)
    x = xs[place.rank].detach().to(place.device).requires_grad_()
    y = case.call(x)
    on_device(place, y)
    close(y, ys[place.rank])
    y.backward(weights[place.rank].to(place.device))  # type: ignore[no-untyped-call]
    on_device(place, x.grad)
    slope = xs[place.rank].grad
    close(x.grad, torch.zeros_like(x) if slope is None else slope)
    halves = inputs(case, torch.bfloat16)
    turned = halves[place.rank].to(place.device).t().clone().t()
    same(case.call(turned), case.model(halves)[place.rank])


@CHECKS()
def coalesced(place: Place) -> None:
    x = torch.arange(24.0, device=place.device).view(4, 6)
    for name in ("all_reduce_coalesced", "all_gather_into_tensor_coalesced"):
        args = ("sum",) if name == "all_reduce_coalesced" else ()
        found = getattr(functional, name)([x, x[:2]], *args)
        expected = getattr(functional, name)([x.cpu(), x[:2].cpu()], *args)
        for one, other in zip(found, expected, strict=True):
            same(one, other)


@CHECKS()
def large_results_and_torchs_nn_module(place: Place) -> None:
    x = torch.ones(1 << 22, device=place.device) * (place.rank + 1)
    y: Any = functional.all_reduce(x)
    assert place.kind in f"{y.device}"
    assert float((y / sum(range(1, place.size + 1))).mean()) == 1.0
    x = torch.ones(4, 6, device=place.device).requires_grad_()
    y = nn_functional.all_reduce(x * 1)
    y.sum().backward()
    close(x.grad, torch.full((4, 6), float(place.size)))
    y = torch.cat(list(nn_functional.all_gather(x)))
    y.sum().backward()
    close(x.grad, torch.full((4, 6), 2.0 * place.size))


def program(x: Tensor) -> Tensor:
    return functional.all_reduce(x * 2, "sum") + functional.all_gather_tensor(x).sum()


def value_and_gradient(fn: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Any]:
    x = x.clone().requires_grad_()
    y: Any = fn(x)
    y.square().sum().backward()
    return y, x.grad


@CHECKS("eager", "aot_eager", "inductor", seconds=180.0)
def compiled(place: Place, backend: str) -> None:
    x = torch.arange(24.0).view(4, 6) / (place.rank + 2)
    fast = torch.compile(program, backend=backend, fullgraph=True)
    found, expected = value_and_gradient(fast, x.to(place.device)), value_and_gradient(program, x)
    on_device(place, *found)
    for one, other in zip(found, expected, strict=True):
        close(one, other)


@CHECKS(seconds=120.0)
def traced(place: Place) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def waited(x: Tensor) -> Tensor:
        return functional.wait_tensor(functional.all_reduce(x * 2))

    x = torch.ones(4, 6, device=place.device) * place.rank
    graph = make_fx(waited)(x)
    assert "tilework" in graph.code
    same(graph(x), waited(x.cpu()))


@CHECKS()
def under_autocast(place: Place) -> None:
    w = torch.ones(6, 6, device=place.device)
    with torch.autocast(place.kind, torch.bfloat16):
        y = functional.all_reduce(w[:4] @ w)
    assert y.dtype is torch.bfloat16
    close(y.float(), torch.full((4, 6), 6.0 * place.size), 0.02)
