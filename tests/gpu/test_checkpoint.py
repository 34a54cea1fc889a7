"""Checkpoints of CUDA tensors, and ShardedTensors on CUDA devices."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tilework.distributed as dist
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
from tilework import checkpoint, sharded
from tilework.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from tilework.dtensor import Replicate, Shard, distribute_tensor, zeros
from tilework.mesh import init_device_mesh
from tilework.parallel import DistributedDataParallel, fully_shard
from tilework.sharded import ChunkShardingSpec, ShardedTensor

require_device()
#: torch leaves some of its functions untyped.
cuda: Any = torch.cuda
CHECKS = Checks()


@in_worlds(ONE, TWO)
def test_checkpoint(world: World, tmp_path: Path) -> None:
    run_checks(__name__, world, tmp_path)


def numbers(place: Place, *shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape).to(place.device)


def model(place: Place, way: str) -> Any:
    torch.manual_seed(0)
    plain: Any = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).to(place.device)
    if way == "fsdp":
        return fully_shard(plain, mesh=place.mesh())
    return DistributedDataParallel(plain) if way == "ddp" else plain


def stepped(place: Place, model: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(place, model, optimizer)
    return optimizer


def step(place: Place, model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    optimizer.zero_grad()
    model(numbers(place, 4, 6)).sum().backward()
    optimizer.step()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return [p.detach().clone() for p in whole]


# -- saving and loading ---------------------------------------------------------------------------


@CHECKS("save", "async_save")
def tensors_of_all_kinds(place: Place, way: str) -> None:
    folder = place.own_folder(f"kinds-{way}") / "saved"
    mesh, x = place.mesh(), numbers(place, 7, 4)
    state: dict[str, Any] = {
        "plain": x,
        "half": x.bfloat16(),
        "view": x.t()[1:],
        "rows": distribute_tensor(x, mesh, [Shard(0)]),
        "columns": distribute_tensor(x, mesh, [Shard(1)]),
        "step": 3,
        "cpu": x.cpu(),
        "pinned": x.cpu().pin_memory() if place.cuda else x.cpu(),
    }
    if way == "save":
        checkpoint.save(state, folder)
    else:
        pending = checkpoint.async_save(state, folder)
        x.add_(1)  # what was saved is what was there
        for name in ("rows", "columns"):
            state[name].add_(1)
        pending.wait()
        x.sub_(1)
    on_gpu: dict[str, Any] = {
        "plain": torch.zeros_like(x),
        "half": torch.zeros_like(x).bfloat16(),
        "rows": zeros(7, 4, device_mesh=mesh, placements=[Shard(1)]),
        "columns": zeros(7, 4, device_mesh=mesh, placements=[Replicate()]),
        "view": torch.zeros(4, 7, device=place.device).t().t()[1:],
        "cpu": torch.zeros_like(x),
        "pinned": torch.zeros(7, 4),
        "step": 0,
    }
    checkpoint.load(folder, into=on_gpu)
    on_device(place, on_gpu["plain"], on_gpu["rows"], on_gpu["cpu"])
    for name in ("plain", "rows", "columns", "cpu", "pinned"):
        same(on_gpu[name], x)
    same(on_gpu["view"], x.t()[1:])
    same(on_gpu["half"], x.bfloat16())
    assert on_gpu["step"] == 3
    cpu_mesh = init_device_mesh("cpu", (place.size,))
    on_cpu = {
        "plain": torch.zeros(7, 4),
        "rows": zeros(7, 4, device_mesh=cpu_mesh, placements=[Shard(0)]),
    }
    checkpoint.load(folder, into=on_cpu, names=["plain", "rows"])
    for value in on_cpu.values():
        assert value.device.type == "cpu"
        same(value, x)
    read = checkpoint.read(folder)
    same(read["rows"], x)


@CHECKS("plain", "ddp", "fsdp")
def training_goes_on(place: Place, way: str) -> None:
    folder = place.own_folder(f"training-{way}") / "saved"
    first = model(place, way)
    optimizer = stepped(place, first)
    checkpoint.save(
        {"model": first, "optimizer": optimizer, "random": checkpoint.RandomState()}, folder
    )
    expected = step(place, first, optimizer)
    drawn = torch.rand(3, device=place.device)
    again = model(place, way)
    other = stepped(place, again)
    step(place, again, other)
    checkpoint.load(
        folder, into={"model": again, "optimizer": other, "random": checkpoint.RandomState()}
    )
    for a, b in zip(step(place, again, other), expected, strict=True):
        same(a, b)
    same(torch.rand(3, device=place.device), drawn)


@CHECKS("ddp", "fsdp")
def from_one_parallelism_to_a_plain_model(place: Place, way: str) -> None:
    folder = place.own_folder(f"plain-{way}") / "saved"
    first = model(place, way)
    optimizer = stepped(place, first)
    checkpoint.save({"model": first, "optimizer": optimizer}, folder)
    plain = model(place, "plain").cpu()
    other = torch.optim.AdamW(plain.parameters(), lr=0.01)
    plain(numbers(place, 4, 6).cpu()).sum().backward()
    other.step()
    checkpoint.load(folder, into={"model": plain, "optimizer": other})
    for a, b in zip(first.parameters(), plain.parameters(), strict=True):
        assert b.device.type == "cpu"
        same(a, b)
    states = list(other.state.values())
    assert all(state["exp_avg"].device.type == "cpu" for state in states)


@CHECKS()
def several_asynchronous_saves(place: Place) -> None:
    folder = place.own_folder("several")
    x = numbers(place, 1 << 16)
    pending = []
    for number in range(3):
        if place.cuda:
            cuda._sleep(20_000_000)
        x.fill_(number)
        pending.append(checkpoint.async_save({"x": x}, folder / str(number)))
    x.fill_(-1)
    for each in pending:
        each.wait()
    for number in range(3):
        out = {"x": torch.zeros_like(x)}
        checkpoint.load(folder / str(number), into=out)
        assert bool((out["x"] == number).all()), (number, out["x"][:3])


@CHECKS("whole", "whole on the cpu", "sharded")
def state_dicts(place: Place, way: str) -> None:
    options = StateDictOptions(full_state_dict=way != "sharded", cpu_offload="cpu" in way)
    first = model(place, "fsdp")
    optimizer = stepped(place, first)
    weights, states = get_state_dict(first, optimizer, options=options)
    kind = "cpu" if "cpu" in way else place.kind
    for value in weights.values():
        assert value.device.type == kind, value.device
    for state in states.get("state", {}).values():  # ranks but the first may have none
        assert state["exp_avg"].device.type == kind
    second = model(place, "fsdp")
    other = stepped(place, second)
    if "cpu" in way:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(second, weights, options=options)
    set_optimizer_state_dict(second, other, states, options=options)
    on_device(place, *second.parameters())
    for a, b in zip(step(place, second, other), step(place, first, optimizer), strict=True):
        close(a, b)
    assert get_model_state_dict(second).keys() == first.state_dict().keys()
    assert get_optimizer_state_dict(second, other)["state"]


@CHECKS()
def own_state_dicts(place: Place) -> None:
    first, second = model(place, "fsdp"), model(place, "fsdp")
    stepped(place, first)
    second.load_state_dict(first.state_dict())
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        same(a, b)
    folder = place.own_folder("torch.save")
    torch.save(first.state_dict(), folder / str(place.rank))
    third = model(place, "fsdp")
    third.load_state_dict(torch.load(folder / str(place.rank), weights_only=False))
    for a, b in zip(first.parameters(), third.parameters(), strict=True):
        same(a, b)


# -- ShardedTensors -------------------------------------------------------------------------------


def spec(place: Place, kind: str | None = None) -> ChunkShardingSpec:
    kind = kind or place.kind
    index = ":0" if kind == "cuda" else ""
    return ChunkShardingSpec(0, [f"rank:{rank}/{kind}{index}" for rank in range(place.size)])


def table(place: Place, x: torch.Tensor, kind: str | None = None) -> Any:
    return sharded.from_full_tensor(x, spec(place, kind))


@CHECKS()
def shards_are_made_on_the_device(place: Place) -> None:
    for made in (
        sharded.zeros(spec(place), 7, 3),
        sharded.rand(spec(place), 7, 3),
        ShardedTensor(spec(place), 7, 3),
        sharded.shard_tensor(numbers(place, 7, 3), spec(place)),
        table(place, numbers(place, 7, 3)),
    ):
        on_device(place, *(shard.tensor for shard in made.local_shards()))
        assert made.shape == (7, 3)
        assert str(made)
    same(table(place, numbers(place, 7, 3)).full_tensor(), numbers(place, 7, 3))


@CHECKS()
def shards_move_between_devices(place: Place) -> None:
    x = numbers(place, 7, 3)
    here = table(place, x.cpu(), "cpu")
    there = here.to(place.device)
    on_device(place, *(shard.tensor for shard in there.local_shards()))
    same(there.full_tensor(), x)
    back = there.cpu()
    assert all(shard.tensor.device.type == "cpu" for shard in back.local_shards())
    same(back.full_tensor(), x)
    if place.cuda:
        moved = here.cuda()
        on_device(place, *(shard.tensor for shard in moved.local_shards()))
        assert moved.cuda().local_tensor() is moved.local_tensor()
        first = moved.metadata().shards_metadata[0]
        assert str(first.placement).startswith("rank:0/cuda")
        same((moved * 2).full_tensor(), x * 2)


@CHECKS()
def operators_of_shards(place: Place) -> None:
    x = numbers(place, 7, 3) / 10
    st = table(place, x)
    same((st + 1).full_tensor(), x + 1)
    same((st * st).full_tensor(), x * x)
    activated: Any = torch.nn.functional.gelu(st)
    close(activated.full_tensor(), torch.nn.functional.gelu(x))
    close(st.sum(), x.sum())
    close(st.softmax(1).full_tensor(), x.softmax(1))
    same(torch.nn.functional.embedding(torch.tensor([0, 6], device=place.device), st), x[[0, 6]])
    close(torch.nn.functional.linear(x, st), torch.nn.functional.linear(x, x), 1e-4)
    same(st.clone().fill_(2).full_tensor(), torch.full((7, 3), 2.0))
    same(copy.deepcopy(st).full_tensor(), x)
    other = ChunkShardingSpec(1, spec(place).placements)
    same(st.reshard(other).full_tensor(), x)


@CHECKS()
def shards_are_gathered(place: Place) -> None:
    x = numbers(place, 7, 3)
    st = table(place, x)
    out = torch.zeros_like(x) if place.rank == 0 else None
    st.gather(0, out)
    if out is not None:
        same(out, x)


@CHECKS()
def layers_of_shards(place: Place) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(6, 4).to(place.device)
    layer = copy.deepcopy(plain)
    sharded.shard_parameter(layer, "weight", spec(place))
    x = numbers(place, 5, 6) / 10
    y: Any = layer(x)
    y = y.full_tensor() if hasattr(y, "full_tensor") else y
    close(y, plain(x), 1e-4)


@CHECKS()
def shards_in_checkpoints(place: Place) -> None:
    folder = place.own_folder("sharded") / "saved"
    x = numbers(place, 7, 3)
    checkpoint.save({"table": table(place, x)}, folder)
    into = {"table": sharded.zeros(spec(place, "cpu"), 7, 3)}
    checkpoint.load(folder, into=into)
    same(into["table"].full_tensor(), x)
    into = {"table": sharded.zeros(spec(place), 7, 3)}
    checkpoint.load(folder, into=into)
    on_device(place, *(shard.tensor for shard in into["table"].local_shards()))
    same(into["table"].full_tensor(), x)
    dist.barrier()
