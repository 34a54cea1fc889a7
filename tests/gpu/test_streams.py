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


#: A call's Work or None, what it writes, and the number that this is full of afterwards.
Called = tuple[Any, Tensor, float]


def run(place: Place, name: str, later: bool) -> Called:
    """Call a collective on tensors that have their values only after a slow kernel."""
    call: Any = getattr(dist, name.partition(" ")[0])
    total, size = sum(range(1, place.size + 1)), items(place)
    match name:
        case "all_reduce" | "broadcast" | "all_reduce not contiguous":
            x = full(place, place.rank + 1.0)
            given = x.view(-1, 64).t() if "not" in name else x
            args = (0,) if name == "broadcast" else ()
            return call(given, *args, async_op=later), x, 1.0 if args else total
        case "all_gather" | "all_to_all":
            x = full(place, 3.0)
            parts = list(x.chunk(place.size))
            outs = [torch.zeros_like(x if name == "all_gather" else part) for part in parts]
            return call(outs, x if name == "all_gather" else parts, async_op=later), outs[-1], 3.0
    x = full(place, 1.0)[: size // place.size * place.size]
    rows = {"all_gather_into_tensor": len(x) * place.size, "all_to_all_single": len(x)}
    out = torch.zeros(rows.get(name, len(x) // place.size), device=place.device)
    return call(out, x, async_op=later), out, 1.0 if name in rows else place.size


OPERATIONS = (
    *("all_reduce", "all_reduce not contiguous", "broadcast", "all_gather_into_tensor"),
    *("all_gather", "reduce_scatter_tensor", "all_to_all_single", "all_to_all"),
)


@CHECKS(*OPERATIONS)
def results_are_there_at_once(place: Place, name: str) -> None:
    """On the current stream and beside it; asynchronous ones after wait()."""
    for stream in (nullcontext, side):
        for later in (False, True):
            with stream(place):
                work, out, expected = run(place, name, later)
                if later:
                    work.wait()
                check(out * 2, expected * 2)


@CHECKS(*OPERATIONS)
def waited_for_by_another_stream(place: Place, name: str) -> None:
    for polls in (False, True):
        with side(place):
            work, out, expected = run(place, name, True)
            while polls and not work.is_completed():
                pass
        with side(place):
            work.wait()
            check(out * 2, expected * 2)


@CHECKS("all_reduce", "all_gather_into_tensor")
def of_a_future(place: Place, name: str) -> None:
    work, _, expected = run(place, name, True)
    found = work.get_future().then(lambda future: future.value()[0] * 2).wait()
    check(found, expected * 2)


@CHECKS("all_reduce", "reduce_scatter_tensor")
def memory_is_kept_until_the_end(place: Place, name: str) -> None:
    """What the operation reads is freed by the program, and the allocator gives it to others."""
    works = [run(place, name, True) for _ in range(3)]
    others = [torch.full((items(place),), -7.0, device=place.device) for _ in range(4)]
    for work, out, expected in works:
        work.wait()
        check(out, expected)
    assert all(bool((other == -7.0).all()) for other in others)


@CHECKS(False, True)
def chains(place: Place, beside: bool) -> None:
    """Each of ten operations needs the result of the one before, on this or another stream."""
    x = torch.ones(items(place), device=place.device)
    stream: Any = cuda.Stream() if place.cuda and beside else None
    for _ in range(10):
        slow(place)
        x.mul_(2)
        if stream is None:
            dist.all_reduce(x)
        else:
            stream.wait_stream(cuda.current_stream())
            with cuda.stream(stream):
                dist.all_reduce(x)
            cuda.current_stream().wait_stream(stream)
        x.div_(place.size)
    check(x, 1024.0)


@CHECKS("all_reduce", "all_gather_tensor", "reduce_scatter_tensor")
def functional_results_wait_by_themselves(place: Place, name: str) -> None:
    call: Callable[[Tensor], Tensor] = getattr(functional, name)
    expected = 1.0 if name == "all_gather_tensor" else float(place.size)
    for first, second in ((nullcontext(), nullcontext()), (side(place), side(place))):
        with first:
            out = call(full(place, 1.0)[: items(place) // place.size * place.size])
        with second:
            check(out * 2, expected * 2)


@CHECKS()
def pinned_memory_and_graphs(place: Place) -> None:
    """A collective within torch.cuda.graph, with NCCL as in torch."""
    if not place.cuda:
        return
    x = torch.full((items(place),), 2.0).pin_memory().to("cuda", non_blocking=True)
    dist.all_reduce(x)
    back = x.to("cpu", non_blocking=True)
    torch.cuda.synchronize()
    check(back, 2.0 * place.size)
    if place.size > 1:
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        dist.all_reduce(y)
        z = y + 1
    for number in (1.0, 2.0):
        x.fill_(number)
        graph.replay()
        check(z, 2 * number + 1)
