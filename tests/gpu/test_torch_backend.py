"""tilework as a backend of torch.distributed, with torch's own engine for CUDA."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.tensor as torch_tensor
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.gpu.world import (
    TORCH_ONE,
    Checks,
    Place,
    World,
    close,
    in_worlds,
    on_device,
    raising,
    require_device,
    run_checks,
    same,
)
from tilework.dtensor import DTensor

require_device()
CHECKS = Checks()


@in_worlds(TORCH_ONE)
def test_torch_backend(world: World, tmp_path: Path) -> None:
    run_checks(__name__, world, tmp_path)


def value(place: Place, rank: int, rows: int = 4) -> torch.Tensor:
    return (torch.arange(rows * 3.0).view(rows, 3) + rank).to(place.device)


def every(place: Place, rows: int = 4) -> torch.Tensor:
    return torch.stack([value(place, rank, rows) for rank in range(place.size)])


@CHECKS(False, True)
def collectives(place: Place, later: bool) -> None:
    def done(work: Any) -> None:
        if work is not None:
            work.wait()

    for kind in {place.kind, "cpu"}:
        mine, xs = value(place, place.rank).to(kind), every(place).to(kind)
        x = mine.clone()
        done(dist.all_reduce(x, async_op=later))
        same(x, xs.sum(0))
        done(dist.broadcast(x, place.size - 1, async_op=later))
        same(x, xs.sum(0))
        out = torch.zeros(4 * place.size, 3, device=kind)
        done(dist.all_gather_into_tensor(out, mine, async_op=later))
        same(out, xs.flatten(0, 1))
        parts = [torch.zeros_like(mine) for _ in range(place.size)]
        done(dist.all_gather(parts, mine, async_op=later))
        same(torch.stack(parts), xs)
        rows = value(place, place.rank, place.size).to(kind)
        x = torch.zeros(1, 3, device=kind)
        done(dist.reduce_scatter_tensor(x, rows, async_op=later))
        same(x[0], every(place, place.size).sum(0)[place.rank])
        x = torch.zeros_like(rows)
        done(dist.all_to_all_single(x, rows, async_op=later))
        same(x, every(place, place.size)[:, place.rank])
        x, root = torch.zeros_like(mine), place.rank == 0
        done(dist.scatter(x, list(xs.unbind()) if root else None, 0, async_op=later))
        same(x, mine)
        done(dist.gather(mine, parts if root else None, 0, async_op=later))


@CHECKS()
def groups_objects_and_blocks(place: Place) -> None:
    dist.barrier()
    out: list[Any] = [None] * place.size
    dist.all_gather_object(out, {"rank": place.rank, "x": value(place, place.rank)})
    assert [o["rank"] for o in out] == list(range(place.size))
    shared = [place.rank]
    dist.broadcast_object_list(shared, 0, device=place.device)
    assert shared == [0]
    xs = [value(place, place.rank) for _ in range(3)]
    with dist.distributed_c10d._coalescing_manager(device=place.device):
        for x in xs:
            dist.all_reduce(x)
    for x in xs:
        same(x, every(place).sum(0))
    dist.all_reduce(xs[0], group=dist.new_group(list(range(place.size))))
    with raising("meta"):
        dist.all_reduce(torch.ones(3, device="meta"))
    if place.cuda:
        with raising("cuda"):
            dist.all_reduce(xs[0], group=dist.new_group(backend="tilework"))


@CHECKS(seconds=120.0)
def functional_collectives(place: Place) -> None:
    group: Any = dist.group.WORLD

    def program(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = functional.all_reduce(x * 2, "sum", group)
        return y + 1

    x = value(place, place.rank)
    for fn in (program, torch.compile(program, backend="aot_eager")):
        on_device(place, fn(x))
        close(fn(x), every(place).sum(0) * 2 + 1)


@CHECKS("ddp", "fsdp")
def torchs_parallelism(place: Place, way: str) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(3, 2).to(place.device)
    model: Any = copy.deepcopy(plain)
    if way == "ddp":
        model = DistributedDataParallel(model, device_ids=[0] if place.cuda else None)
    else:
        fully_shard(model, mesh=init_device_mesh(place.kind, (place.size,)))
    x = every(place)
    plain(x).square().mean().backward()
    model(x[place.rank]).square().mean().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        close(a.grad, b.grad, 1e-4)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    torch.optim.AdamW(model.parameters(), lr=0.1).step()


@CHECKS()
def tensors_of_both_libraries(place: Place) -> None:
    mesh = init_device_mesh(place.kind, (place.size,))
    x = torch.arange(24.0, device=place.device).view(6, 4)
    theirs = torch_tensor.distribute_tensor(x, mesh, [torch_tensor.Shard(0)])
    close(theirs @ theirs.t(), x @ x.t())
    same(theirs.redistribute(placements=[torch_tensor.Shard(1)]), x)
    ours = DTensor.from_torch(theirs)
    on_device(place, ours)
    same(ours * 2, x * 2)
    same(ours.to_torch() + 1, x + 1)


@CHECKS()
def checkpoints_of_torch(place: Place) -> None:
    folder = place.own_folder("dcp")
    x = value(place, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save({"x": x}, checkpoint_id=folder)
        state = {"x": torch.zeros_like(x)}
        load(state, checkpoint_id=folder)
    on_device(place, state["x"])
    same(state["x"], x)


@CHECKS()
def large_tensors_on_streams(place: Place) -> None:
    if not place.cuda:
        return
    cuda: Any = torch.cuda
    with cuda.stream(cuda.Stream()):
        x = torch.zeros(16 << 20, device="cuda")
        cuda._sleep(50_000_000)
        x.add_(place.rank + 1.0)
        work: Any = dist.all_reduce(x, async_op=True)
        work.wait()
        wrong = int((x != sum(range(1, place.size + 1))).sum())
    assert wrong == 0, wrong
