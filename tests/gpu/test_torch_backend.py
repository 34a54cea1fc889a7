"""tilework as a backend of torch.distributed, with torch's own engine for CUDA."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
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
        mine = value(place, place.rank).to(kind)
        x = mine.clone()
        done(dist.all_reduce(x, async_op=later))
        same(x, every(place).sum(0))
        x = mine.clone()
        done(dist.broadcast(x, place.size - 1, async_op=later))
        same(x, value(place, place.size - 1))
        out = torch.zeros(4 * place.size, 3, device=kind)
        done(dist.all_gather_into_tensor(out, mine, async_op=later))
        same(out, every(place).flatten(0, 1))
        parts = [torch.zeros_like(mine) for _ in range(place.size)]
        done(dist.all_gather(parts, mine, async_op=later))
        same(torch.stack(parts), every(place))
        x = torch.zeros(1, 3, device=kind)
        rows = value(place, place.rank, place.size).to(kind)
        done(dist.reduce_scatter_tensor(x, rows, async_op=later))
        same(x[0], every(place, place.size).sum(0)[place.rank])
        x = torch.zeros_like(rows)
        done(dist.all_to_all_single(x, rows, async_op=later))
        same(x, every(place, place.size)[:, place.rank])
        x = mine.clone()
        done(dist.reduce(x, 0, async_op=later))
        x = torch.zeros_like(mine)
        sources = list(every(place).to(kind).unbind()) if place.rank == 0 else None
        done(dist.scatter(x, sources, 0, async_op=later))
        same(x, mine)
        gathered = [torch.zeros_like(mine) for _ in range(place.size)] if place.rank == 0 else None
        done(dist.gather(mine, gathered, 0, async_op=later))


@CHECKS()
def barriers_and_objects(place: Place) -> None:
    dist.barrier()
    out: list[Any] = [None] * place.size
    dist.all_gather_object(out, {"rank": place.rank, "x": value(place, place.rank)})
    assert [o["rank"] for o in out] == list(range(place.size))
    shared = [place.rank]
    dist.broadcast_object_list(shared, 0, device=place.device)
    assert shared == [0]


@CHECKS()
def coalesced(place: Place) -> None:
    xs = [value(place, place.rank) for _ in range(3)]
    with dist.distributed_c10d._coalescing_manager(device=place.device):
        for x in xs:
            dist.all_reduce(x)
    for x in xs:
        same(x, every(place).sum(0))


@CHECKS()
def groups(place: Place) -> None:
    group = dist.new_group(list(range(place.size)))
    x = value(place, place.rank)
    dist.all_reduce(x, group=group)
    same(x, every(place).sum(0))
    first = dist.new_group([0])
    if place.rank == 0:
        dist.all_reduce(x, group=first)


@CHECKS(seconds=120.0)
def functional_collectives(place: Place) -> None:
    group: Any = dist.group.WORLD

    def program(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = functional.all_reduce(x * 2, "sum", group)
        return y + 1

    x = value(place, place.rank)
    close(program(x), every(place).sum(0) * 2 + 1)
    close(torch.compile(program, backend="aot_eager")(x), every(place).sum(0) * 2 + 1)
    on_device(place, program(x))


@CHECKS()
def torchs_ddp(place: Place) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(3, 2).to(place.device)
    ids = [0] if place.cuda else None
    model = DistributedDataParallel(nn.Linear(3, 2).to(place.device), device_ids=ids)
    model.module.load_state_dict(plain.state_dict())
    x = every(place)
    plain(x).square().mean().backward()
    model(x[place.rank]).square().mean().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        close(a.grad, b.grad, 1e-4)


@CHECKS()
def torchs_fully_shard(place: Place) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(place.kind, (place.size,))
    torch.manual_seed(0)
    plain = nn.Linear(4, 4).to(place.device)
    torch.manual_seed(0)
    model: Any = fully_shard(nn.Linear(4, 4).to(place.device), mesh=mesh)
    x = torch.ones(2, 4, device=place.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(x).sum().backward()
    plain(x).sum().backward()
    close(model.weight.grad, plain.weight.grad)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@CHECKS()
def torchs_dtensors(place: Place) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(place.kind, (place.size,))
    x = torch.arange(24.0, device=place.device).view(6, 4)
    d = distribute_tensor(x, mesh, [Shard(0)])
    close(d @ d.t(), x @ x.t())
    same(d.redistribute(placements=[Replicate()]), x)
    same(d.redistribute(placements=[Shard(1)]), x)


@CHECKS()
def tensors_of_both_libraries(place: Place) -> None:
    import torch.distributed.tensor as theirs
    from torch.distributed.device_mesh import init_device_mesh

    from tilework.dtensor import DTensor

    mesh = init_device_mesh(place.kind, (place.size,))
    x = torch.arange(24.0, device=place.device).view(6, 4)
    d = DTensor.from_torch(theirs.distribute_tensor(x, mesh, [theirs.Shard(0)]))
    on_device(place, d)
    same(d * 2, x * 2)
    same(d.redistribute(placements=[theirs.Replicate()]), x)  # type: ignore[list-item]
    same(d.to_torch() + 1, x + 1)


@CHECKS()
def checkpoints_of_torch(place: Place) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

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
def pipelines(place: Place) -> None:
    if place.size == 1:
        return
    x = value(place, place.rank)
    message: Any = dist.send if place.rank == 0 else dist.recv
    if place.cuda:  # Gloo sends no CUDA tensors, in torch neither
        with raising(""):
            message(x, 1 - place.rank)
        return
    message(x, 1 - place.rank)
    same(x, value(place, 0))


@CHECKS()
def devices_without_an_engine_are_refused(place: Place) -> None:
    with raising("meta"):
        dist.all_reduce(torch.ones(3, device="meta"))
    if place.cuda:
        group = dist.new_group(backend="tilework")
        with raising("cuda"):
            dist.all_reduce(torch.ones(3, device="cuda"), group=group)


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
