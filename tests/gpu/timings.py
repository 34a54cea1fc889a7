"""Microseconds of collectives and DTensor operators on this GPU: ``python -m tests.gpu.timings``.

With one rank: NCCL through tilework and through torch.distributed, and operators of DTensors
beside those of plain tensors. Nothing is asserted.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as torch_dist

import tilework.distributed as dist
from tests.gpu.world import device_type
from tilework.dtensor import Replicate, Shard, distribute_tensor
from tilework.mesh import init_device_mesh

SIZES = {"1 KiB": 1 << 8, "64 MiB": 1 << 24}


def microseconds(fn: Callable[[], object], kind: str) -> tuple[float, float]:
    """(until the call returns, until the device is done), medians."""
    device: Any = torch.cuda if kind == "cuda" else torch.cpu
    wait = device.synchronize
    calls, whole = [], []
    for _ in range(50):
        wait()
        began = time.perf_counter()
        fn()
        calls.append(time.perf_counter() - began)
        wait()
        whole.append(time.perf_counter() - began)
    return statistics.median(calls[10:]) * 1e6, statistics.median(whole[10:]) * 1e6


def show(name: str, fn: Callable[[], object], kind: str) -> None:
    call, whole = microseconds(fn, kind)
    print(f"{name:<60} {call:>9.1f} {whole:>9.1f}", flush=True)


def collectives(kind: str, folder: str) -> None:
    """all_reduce and all_gather_into_tensor, with and without async_op."""
    store = dist.FileStore(f"{folder}/own", 1)
    backend = "cpu:shm,cuda:nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    torch_dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method=f"file://{folder}/theirs",
        rank=0,
        world_size=1,
    )
    libraries: list[tuple[str, Any]] = [("torch", torch_dist), ("tilework", dist)]
    for size, items in SIZES.items():
        x, out = torch.ones(items, device=kind), torch.ones(items, device=kind)
        for name, library in libraries:
            calls: dict[str, Callable[[], object]] = {
                "all_reduce": partial(library.all_reduce, x),
                "all_reduce, async": partial(waited, library.all_reduce, x),
                "all_gather_into_tensor": partial(library.all_gather_into_tensor, out, x),
            }
            for call, fn in calls.items():
                show(f"{call} {size}, {name}", fn, kind)


def waited(fn: Callable[..., Any], x: torch.Tensor) -> None:
    """Start it, then wait."""
    fn(x, async_op=True).wait()


def operators(kind: str) -> None:
    """An operator of small DTensors beside the same of plain tensors."""
    mesh = init_device_mesh(kind, (1,))
    x = torch.ones(64, 64, device=kind)
    sharded = distribute_tensor(x, mesh, [Shard(0)])
    whole = distribute_tensor(x, mesh, [Replicate()])
    programs: dict[str, Callable[[Any, Any], object]] = {
        "a + a": lambda a, b: a + a,
        "a @ b": lambda a, b: a @ b,
        "a.softmax(1)": lambda a, b: a.softmax(1),
        "a.add_(1)": lambda a, b: a.add_(1),
        "torch.nn.functional.dropout(a)": lambda a, b: torch.nn.functional.dropout(a),
        "torch.rand_like(a)": lambda a, b: torch.rand_like(a),
    }
    for name, program in programs.items():
        show(f"{name}, plain", lambda p=program: p(x, x), kind)  # type: ignore[misc]
        show(f"{name}, DTensors", lambda p=program: p(sharded, whole), kind)  # type: ignore[misc]


def main() -> None:
    kind = device_type() or "cpu"
    print(f"{'µs on ' + kind:<60} {'call':>9} {'done':>9}")
    with tempfile.TemporaryDirectory() as folder:
        collectives(kind, folder)
        operators(kind)
        torch_dist.destroy_process_group()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
