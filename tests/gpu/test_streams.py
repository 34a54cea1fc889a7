"""Collectives beside CUDA streams: what is enqueued before is seen, results wait for the end.

Slow kernels stand before what is communicated, so a synchronisation that is missing shows as wrong
numbers. On the CPU the streams are nothing, and the rest is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tilework.distributed as dist
import tilework.distributed.functional as functional
from tests.gpu.world import ONE, TWO, Checks, Place, World, in_worlds, require_device, run_checks

require_device()
CHECKS = Checks()
#: torch leaves some of its functions untyped.
cuda: Any = torch.cuda
#: Items of 64 MiB on a GPU.
LARGE = 16 << 20
#: Clock cycles of a GPU that take about 30 ms.
SLOW = 50_000_000


@in_worlds(ONE, TWO)
def test_streams(world: World, tmp_path: Path) -> None:
    run_checks(__name__, world, tmp_path)


def items(place: Place) -> int:
    return LARGE if place.cuda else 1 << 12


def slow(place: Place) -> None:
    """Keep the current stream busy for a moment."""
    if place.cuda:
        cuda._sleep(SLOW)


def side(place: Place) -> AbstractContextManager[Any]:
    """A stream beside the current one, made current."""
    return cuda.stream(cuda.Stream()) if place.cuda else nullcontext()


def full(place: Place, number: float) -> Tensor:
    """A large tensor that has its values only after a slow kernel."""
    x = torch.zeros(items(place), device=place.device)
    slow(place)
    return x.add_(number)


def check(x: Tensor, number: float) -> None:
    """Fail unless all values are right, as the current stream sees them."""
    wrong = int((x != number).sum())
    assert wrong == 0, f"{wrong} of {x.numel()} values are not {number}, but e.g. {x[:3].tolist()}"


Operation = Callable[[Place, bool], tuple[Any, Tensor, float]]


def all_reduce(place: Place, later: bool) -> tuple[Any, Tensor, float]:
    x = full(place, place.rank + 1.0)
    work = dist.all_reduce(x, async_op=later)
    return work, x, sum(range(1, place.size + 1))


def broadcast(place: Place, later: bool) -> tuple[Any, Tensor, float]:
    x = full(place, place.rank + 1.0)
    return dist.broadcast(x, 0, async_op=later), x, 1.0


def all_gather_into_tensor(place: Place, later: bool) -> tuple[Any, Tensor, float]:
    out = torch.zeros(items(place) * place.size, device=place.device)
    work = dist.all_gather_into_tensor(out, full(place, 3.0), async_op=later)
    return work, out, 3.0


def all_gather(place: Place, later: bool) -> tuple[Any, Tensor, float]:
    out = [torch.zeros(items(place), device=place.device) for _ in range(place.size)]
    work = dist.all_gather(out, full(place, 3.0), async_op=later)
    return work, out[-1], 3.0


def reduce_scatter_tensor(place: Place, later: bool) -> tuple[Any, Tensor, float]:
    out = torch.zeros(items(place) // place.size, device=place.device)
    x = full(place, 1.0)[: len(out) * place.size]
    return dist.reduce_scatter_tensor(out, x, async_op=later), out, float(place.size)


def all_to_all_single(place: Place, later: bool) -> tuple[Any, Tensor, float]:
    x = full(place, 5.0)
    out = torch.zeros_like(x)
    return dist.all_to_all_single(out, x, async_op=later), out, 5.0


def all_to_all(place: Place, later: bool) -> tuple[Any, Tensor, float]:
    parts = list(full(place, 5.0).chunk(place.size))
    out = [torch.zeros_like(part) for part in parts]
    return dist.all_to_all(out, parts, async_op=later), out[-1], 5.0


def not_contiguous(place: Place, later: bool) -> tuple[Any, Tensor, float]:
    x = full(place, place.rank + 1.0).view(-1, 64).t()
    work = dist.all_reduce(x, async_op=later)
    return work, x[0], sum(range(1, place.size + 1))


OPERATIONS = (
    all_reduce,
    broadcast,
    all_gather_into_tensor,
    all_gather,
    reduce_scatter_tensor,
    all_to_all_single,
    all_to_all,
    not_contiguous,
)


@CHECKS(*OPERATIONS)
def results_are_there_at_once(place: Place, run: Operation) -> None:
    for _ in range(3):
        _, out, expected = run(place, False)
        check(out * 2, expected * 2)


@CHECKS(*OPERATIONS)
def on_a_side_stream(place: Place, run: Operation) -> None:
    with side(place):
        _, out, expected = run(place, False)
        check(out * 2, expected * 2)


@CHECKS(*OPERATIONS)
def asynchronous(place: Place, run: Operation) -> None:
    work, out, expected = run(place, True)
    work.wait()
    check(out * 2, expected * 2)


@CHECKS(*OPERATIONS)
def asynchronous_on_a_side_stream(place: Place, run: Operation) -> None:
    with side(place):
        work, out, expected = run(place, True)
        work.wait()
        check(out * 2, expected * 2)


@CHECKS(*OPERATIONS)
def waited_for_by_another_stream(place: Place, run: Operation) -> None:
    with side(place):
        work, out, expected = run(place, True)
    with side(place):
        work.wait()
        check(out * 2, expected * 2)


@CHECKS(*OPERATIONS)
def polled(place: Place, run: Operation) -> None:
    with side(place):
        work, out, expected = run(place, True)
        while not work.is_completed():
            pass
    with side(place):
        work.wait()
        check(out * 2, expected * 2)


@CHECKS(all_reduce, all_gather_into_tensor)
def of_a_future(place: Place, run: Operation) -> None:
    work, _, expected = run(place, True)
    found = work.get_future().then(lambda future: future.value()[0] * 2).wait()
    check(found, expected * 2)


@CHECKS(all_reduce, reduce_scatter_tensor)
def memory_is_kept_until_the_end(place: Place, run: Operation) -> None:
    """What the operation reads is freed by the program, and the allocator gives it to others."""
    works = [run(place, True) for _ in range(3)]
    others = [torch.full((items(place),), -7.0, device=place.device) for _ in range(4)]
    for work, out, expected in works:
        work.wait()
        check(out, expected)
    assert all(bool((other == -7.0).all()) for other in others)


@CHECKS()
def what_follows_sees_the_result_and_what_precedes_is_seen(place: Place) -> None:
    """A chain of ten: each operation needs the result of the one before."""
    x = torch.ones(items(place), device=place.device)
    for _ in range(10):
        slow(place)
        x = x * 2
        dist.all_reduce(x)
        x = x / place.size
    check(x, 1024.0)


@CHECKS()
def chains_over_streams(place: Place) -> None:
    x = torch.ones(items(place), device=place.device)
    stream: Any = cuda.Stream() if place.cuda else None
    for _ in range(5):
        slow(place)
        x.mul_(2)
        if stream is None:
            dist.all_reduce(x)
        else:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                dist.all_reduce(x)
            torch.cuda.current_stream().wait_stream(stream)
        x.div_(place.size)
    check(x, 32.0)


@CHECKS("all_reduce", "all_gather_tensor", "reduce_scatter_tensor")
def functional_results_wait_by_themselves(place: Place, name: str) -> None:
    for stream in (nullcontext(), side(place)):
        with stream:
            x = full(place, 1.0)[: items(place) // place.size * place.size]
            out = getattr(functional, name)(x)
            expected = 1.0 if name == "all_gather_tensor" else float(place.size)
            y = out * 2
            assert y.device.type == place.kind
            check(y, expected * 2)


@CHECKS()
def functional_results_on_another_stream(place: Place) -> None:
    with side(place):
        out = functional.all_reduce(full(place, 1.0))
    with side(place):
        check(out * 1, float(place.size))


@CHECKS()
def copies_from_pinned_memory(place: Place) -> None:
    if not place.cuda:
        return
    source = torch.full((items(place),), 2.0).pin_memory()
    x = source.to("cuda", non_blocking=True)
    dist.all_reduce(x)
    back = x.to("cpu", non_blocking=True)
    torch.cuda.synchronize()
    check(back, 2.0 * place.size)


@CHECKS()
def graphs_of_cuda_are_refused_or_right(place: Place) -> None:
    """A collective within torch.cuda.graph, with NCCL as in torch."""
    if not place.cuda or place.size > 1:
        return
    x = torch.ones(1024, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        dist.all_reduce(y)
        z = y + 1
    for number in (1.0, 2.0):
        x.fill_(number)
        graph.replay()
        check(z, 2 * number + 1)
