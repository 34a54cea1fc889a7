"""Functional collectives on CUDA tensors: values, gradients, traces, compilers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tilework.distributed as dist
import tilework.distributed.functional as functional
import tilework.distributed.nn.functional as nn_functional
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


Apply = Callable[[Place, Tensor], Tensor]


def all_reduce(place: Place, x: Tensor) -> Tensor:
    return functional.all_reduce(x)


def mean(place: Place, x: Tensor) -> Tensor:
    return functional.all_reduce(x, "avg")


def greatest(place: Place, x: Tensor) -> Tensor:
    return functional.all_reduce(x, "max")


def reduce(place: Place, x: Tensor) -> Tensor:
    return functional.reduce(x, 0)


def broadcast(place: Place, x: Tensor) -> Tensor:
    return functional.broadcast(x, 0)


def all_gather(place: Place, x: Tensor) -> Tensor:
    return functional.all_gather_tensor(x)


def all_gather_columns(place: Place, x: Tensor) -> Tensor:
    return functional.all_gather_tensor(x, 1)


def reduce_scatter(place: Place, x: Tensor) -> Tensor:
    return functional.reduce_scatter_tensor(x)


def reduce_scatter_columns(place: Place, x: Tensor) -> Tensor:
    return functional.reduce_scatter_tensor(x, "sum", 1)


def all_to_all(place: Place, x: Tensor) -> Tensor:
    return functional.all_to_all_single(x)


def permute(place: Place, x: Tensor) -> Tensor:
    return functional.permute_tensor(x, [(r + 1) % place.size for r in range(place.size)])


def there_and_back(place: Place, x: Tensor) -> Tensor:
    return functional.gather_from_group(functional.scatter_to_group(x, 0), 0)


def copy_and_reduce(place: Place, x: Tensor) -> Tensor:
    return functional.reduce_from_group(functional.copy_to_group(x))


KINDS = (
    all_reduce,
    mean,
    greatest,
    reduce,
    broadcast,
    all_gather,
    all_gather_columns,
    reduce_scatter,
    reduce_scatter_columns,
    all_to_all,
    permute,
    there_and_back,
    copy_and_reduce,
)


def inputs(place: Place, rows: int = 4, columns: int = 6) -> Tensor:
    numbers = torch.arange(float(rows * columns)).view(rows, columns)
    return (numbers * (place.rank + 2)) % 7


def on_threads_of(place: Place, fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The result and the gradient of a function of the device, and of the same on the CPU."""
    x = x.clone().requires_grad_()
    y: Any = fn(x)
    loss: Any = (y * torch.arange(float(y.numel()), device=y.device).view(y.shape)).sum()
    loss.backward()
    assert x.grad is not None
    return torch.cat([y.detach().flatten(), x.grad.flatten()])


def compared(
    place: Place, fn: Callable[[Tensor], Tensor], twin: Callable[[Tensor], Tensor]
) -> None:
    found = on_threads_of(place, fn, inputs(place).to(place.device))
    on_device(place, found)
    close(found, on_threads_of(place, twin, inputs(place)))


@CHECKS(*KINDS)
def values_and_gradients(place: Place, apply: Apply) -> None:
    """As on the CPU, which other tests compare with formulas."""
    compared(place, lambda x: apply(place, x), lambda x: apply(place, x))


@CHECKS(*KINDS)
def of_other_layouts_and_dtypes(place: Place, apply: Apply) -> None:
    for x in (inputs(place, 6, 4).t(), inputs(place, 4, 12)[:, ::2]):
        same(
            apply(place, x.to(place.device).to(torch.bfloat16)), apply(place, x.to(torch.bfloat16))
        )


@CHECKS()
def large_results(place: Place) -> None:
    x = torch.ones(1 << 22, device=place.device) * (place.rank + 1)
    y = functional.all_reduce(x)
    text = f"{type(y).__name__} {y.shape} {y.device}"
    assert place.kind in text
    assert float((y / sum(range(1, place.size + 1))).mean()) == 1.0


@CHECKS()
def coalesced(place: Place) -> None:
    xs = [inputs(place).to(place.device), inputs(place, 2).to(place.device)]
    for name in ("all_reduce_coalesced", "all_gather_into_tensor_coalesced"):
        args = ("sum",) if name == "all_reduce_coalesced" else ()
        found = getattr(functional, name)(xs, *args)
        expected = getattr(functional, name)([x.cpu() for x in xs], *args)
        for one, other in zip(found, expected, strict=True):
            same(one, other)


@CHECKS()
def of_torchs_nn_module(place: Place) -> None:
    x = inputs(place).to(place.device).requires_grad_()
    y: Any = nn_functional.all_reduce(x * 1)
    y.sum().backward()
    close(x.grad, torch.full((4, 6), float(place.size)))
    parts: Any = nn_functional.all_gather(x)
    loss: Any = torch.cat(list(parts)).sum()
    loss.backward()


@CHECKS("eager", "aot_eager", "inductor", seconds=180.0)
def compiled(place: Place, backend: str) -> None:
    def program(x: Tensor) -> Tensor:
        return functional.all_reduce(x * 2, "sum") + functional.all_gather_tensor(x).sum()

    fast = torch.compile(program, backend=backend, fullgraph=True)
    compared(place, fast, program)


@CHECKS(seconds=120.0)
def traced(place: Place) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def program(x: Tensor) -> Tensor:
        return functional.wait_tensor(functional.all_reduce(x * 2))

    x = inputs(place).to(place.device)
    graph = make_fx(program)(x)
    assert "tilework" in graph.code
    same(graph(x), program(x.cpu()))


@CHECKS()
def under_autocast(place: Place) -> None:
    w = torch.ones(6, 6, device=place.device)
    with torch.autocast(place.kind, torch.bfloat16):
        y = functional.all_reduce(inputs(place).to(place.device) @ w)
    assert y.dtype is torch.bfloat16
    every = [torch.zeros_like(w[:4]) for _ in range(place.size)]
    dist.all_gather(every, inputs(place).to(place.device))
    close(y.float(), torch.stack([x.cpu() @ torch.ones(6, 6) for x in every]).sum(0), 0.02)
