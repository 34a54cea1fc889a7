"""Faults of programs on CUDA tensors: an error on each rank, in bounded time."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import tilework.distributed as dist
from tests.gpu.world import OPERATION_SECONDS, device_type, require_device
from tests.jobs import Job, Rank
from tilework.mesh import init_device_mesh
from tilework.parallel import DistributedDataParallel, fully_shard

require_device()
#: Seconds until every rank has raised: an operation's timeout, and the start of processes.
LIMIT = 4 * OPERATION_SECONDS
NOT_HERE = pytest.mark.skipif(device_type() != "cuda", reason="needs a GPU")


def device() -> str:
    kind = device_type()
    assert kind is not None
    return kind


def join(rank: Rank, backend: str | None = None) -> None:
    cuda = device() == "cuda"
    if cuda:
        torch.cuda.set_device(0)
    store = dist.FileStore(os.fspath(rank.folder / "store"), rank.size)
    dist.init_process_group(
        backend or ("cpu:shm,cuda:gloo" if cuda else "gloo"),
        store=store,
        rank=rank.number,
        world_size=rank.size,
        timeout=timedelta(seconds=OPERATION_SECONDS),
    )


#: The error's class and text, and the seconds; ("", "", …) if there was none.
Outcome = tuple[str, str, float]


def outcome(fn: Callable[[], Any]) -> Outcome:
    began = time.monotonic()
    try:
        fn()
        if device() == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def outcomes(folder: Path, program: Callable[..., Any], *args: Any) -> list[Outcome]:
    """The outcomes of two ranks; one that dies has none."""
    found: list[Outcome] = []
    with Job(folder, 2, program, args) as job:
        for number, process in enumerate(job.processes):
            try:
                found.append(job.hear(number, LIMIT))
            except EOFError:
                found.append(("died", "", 0.0))
            except TimeoutError:
                found.append(("hangs", "", LIMIT))
                if process.exitcode is None:
                    job.kill(number)
    for rank, (kind, text, seconds) in enumerate(found):
        print(f"rank {rank}: {kind or 'no error'} after {seconds:.1f} s: {text[:600]}")
    return found


def check_all_raise(found: list[Outcome]) -> None:
    for kind, _, seconds in found:
        assert kind not in ("", "hangs"), found
        assert seconds < 3 * OPERATION_SECONDS


# -- two ranks of NCCL on one GPU -----------------------------------------------------------------


def _share_a_gpu(rank: Rank) -> Outcome:
    def program() -> None:
        join(rank, "cpu:shm,cuda:nccl")
        dist.all_reduce(torch.ones(4, device="cuda"))
        torch.cuda.synchronize()

    found = outcome(program)
    time.sleep(0.5)
    return found


@NOT_HERE
def test_nccl_refuses_two_ranks_of_one_gpu_on_both(tmp_path: Path) -> None:
    found = outcomes(tmp_path, _share_a_gpu)
    check_all_raise(found)
    assert any("uplicate GPU" in text for _, text, _ in found), found


# -- ranks that call different things, come late, or die ------------------------------------------


def _differ(rank: Rank, name: str) -> Outcome:
    join(rank)
    x = torch.ones(4 + rank.number, device=device())
    out = [torch.zeros_like(x) for _ in range(rank.size)]
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(x),
        "all_gather": lambda: dist.all_gather(out, x),
        "operations": lambda: dist.broadcast(x, 0) if rank.number else dist.all_reduce(x),
    }

    def program() -> None:
        for _ in range(3):
            calls[name]()
            dist.barrier()

    return outcome(program)


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "operations"])
def test_shapes_that_differ_end_in_bounded_time(name: str, tmp_path: Path) -> None:
    """torch's Gloo compares nothing, and may end a process; no rank waits for ever."""
    found = outcomes(tmp_path, _differ, name)
    assert all(kind != "hangs" for kind, _, _ in found), found
    assert any(kind.endswith("Error") for kind, _, _ in found), found


def _leave_alone(rank: Rank, way: str) -> Outcome:
    """The second rank is late, or dies, after a first step."""
    join(rank)
    model: Any = torch.nn.Linear(4, 4).to(device())
    if way == "ddp":
        model = DistributedDataParallel(model)
    elif way == "fsdp":
        model = fully_shard(model, mesh=init_device_mesh(device(), (2,)))
    x = torch.ones(4, 4, device=device())

    def step() -> None:
        if way in ("ddp", "fsdp"):
            model(x).sum().backward()
        else:
            dist.all_reduce(x)

    step()
    if rank.number == 1 and way == "late":
        time.sleep(OPERATION_SECONDS + 2)
        return "late", "", 0.0
    if rank.number == 1:
        os._exit(7)
    time.sleep(0.5)

    def steps() -> None:
        for _ in range(3):
            step()

    return outcome(steps)


@pytest.mark.parametrize("way", ["late", "all_reduce", "ddp", "fsdp"])
def test_a_rank_that_does_not_come_is_named(way: str, tmp_path: Path) -> None:
    (kind, text, seconds), (other, _, _) = outcomes(tmp_path, _leave_alone, way)
    assert other == ("late" if way == "late" else "died")
    kinds = ["CollectiveTimeoutError", *([] if way == "late" else ["PeerLostError"])]
    assert kind in kinds, (kind, text)
    assert "rank 1" in text
    assert seconds < 3 * OPERATION_SECONDS


# -- errors of the device -------------------------------------------------------------------------


def _index_out_of_range(rank: Rank) -> Outcome:
    """A kernel that fails on one rank: both end, and neither waits for ever."""
    join(rank)
    x = torch.ones(4, device="cuda")
    index = torch.tensor([9 if rank.number == 1 else 0], device="cuda")

    def program() -> None:
        y = x[index].expand(4).clone()
        for _ in range(3):
            dist.all_reduce(y)
            y.sum().item()

    return outcome(program)


@NOT_HERE
def test_a_kernel_that_fails_on_one_rank(tmp_path: Path) -> None:
    found = outcomes(tmp_path, _index_out_of_range)
    check_all_raise(found)


def _out_of_memory(rank: Rank) -> Outcome:
    """An error in which the group goes on."""
    join(rank)

    def program() -> None:
        with contextlib.suppress(torch.OutOfMemoryError):
            torch.empty(1 << 50, device="cuda")
        x = torch.ones(4, device="cuda")
        dist.all_reduce(x)
        assert x.sum().item() == 8

    return outcome(program)


@NOT_HERE
def test_out_of_memory_leaves_the_group(tmp_path: Path) -> None:
    assert [kind for kind, _, _ in outcomes(tmp_path, _out_of_memory)] == ["", ""]
