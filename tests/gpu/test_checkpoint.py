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
    plain,
    require_device,
    run_checks,
    same,
)
from tilework import checkpoint, sharded
from tilework.checkpoint.state_dict import (
    StateDictOptions,
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
    made: Any = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).to(place.device)
    if way == "fsdp":
        return fully_shard(made, mesh=place.mesh())
    return DistributedDataParallel(made) if way == "ddp" else made


def stepped(model: Any, optimizer: Any = None) -> Any:
    """The optimizer after a step of the model."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer.zero_grad()
    device = next(model.parameters()).device
    model(torch.arange(24.0, device=device).view(4, 6)).sum().backward()
    optimizer.step()
    return optimizer


def weights(model: Any) -> list[torch.Tensor]:
    return [plain(parameter) for parameter in model.parameters()]


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
    into: dict[str, Any] = {
        "plain": torch.zeros_like(x),
        "half": torch.zeros_like(x).bfloat16(),
        "rows": zeros(7, 4, device_mesh=mesh, placements=[Shard(1)]),
        "columns": zeros(7, 4, device_mesh=mesh, placements=[Replicate()]),
        "view": torch.zeros(4, 7, device=place.device)[1:],
        "cpu": torch.zeros_like(x),
        "pinned": torch.zeros(7, 4),
    }
    checkpoint.load(folder, into=into)
    on_device(place, *(into[name] for name in ("plain", "half", "rows", "view", "cpu")))
    for name in ("plain", "rows", "columns", "cpu", "pinned"):
        same(into[name], x)
    same(into["view"], x.t()[1:])
    same(into["half"], x.bfloat16())
    cpu_mesh = init_device_mesh("cpu", (place.size,))
    on_cpu = {
        "plain": torch.zeros(7, 4),
        "rows": zeros(7, 4, device_mesh=cpu_mesh, placements=[Shard(0)]),
    }
    checkpoint.load(folder, into=on_cpu, names=["plain", "rows"])
    for value in on_cpu.values():
        assert value.device.type == "cpu"
        same(value, x)


@CHECKS("plain", "ddp", "fsdp")
def training_goes_on(place: Place, way: str) -> None:
    """In the same parallelism, and in one process on the CPU."""
    folder = place.own_folder(f"training-{way}") / "saved"
    first = model(place, way)
    optimizer, random = stepped(first), checkpoint.RandomState()
    checkpoint.save({"model": first, "optimizer": optimizer, "random": random}, folder)
    saved = weights(first)
    stepped(first, optimizer)
    drawn = torch.rand(3, device=place.device)
    again = model(place, way)
    other = stepped(again)
    checkpoint.load(folder, into={"model": again, "optimizer": other, "random": random})
    stepped(again, other)
    for a, b in zip(weights(again), weights(first), strict=True):
        same(a, b)
    same(torch.rand(3, device=place.device), drawn)
    alone = model(place, "plain").cpu()
    other = stepped(alone)
    checkpoint.load(folder, into={"model": alone, "optimizer": other})
    for a, b in zip(alone.parameters(), saved, strict=True):
        same(a, b)
    assert all(state["exp_avg"].device.type == "cpu" for state in other.state.values())


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
    first, second = model(place, "fsdp"), model(place, "fsdp")
    optimizer, other = stepped(first), stepped(second)
    values, states = get_state_dict(first, optimizer, options=options)
    kind = "cpu" if "cpu" in way else place.kind
    assert {value.device.type for value in values.values()} <= {kind}
    for state in states.get("state", {}).values():  # ranks but the first may have none
        assert state["exp_avg"].device.type == kind
    if "cpu" in way:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(second, values, options=options)
    set_optimizer_state_dict(second, other, states, options=options)
    on_device(place, *second.parameters())
    stepped(first, optimizer)
    stepped(second, other)
    for a, b in zip(weights(second), weights(first), strict=True):
        close(a, b)


@CHECKS()
def own_state_dicts(place: Place) -> None:
    """Through a file of torch's, too."""
    first, second = model(place, "fsdp"), model(place, "fsdp")
    stepped(first)
    path = place.own_folder("torch.save") / str(place.rank)
    torch.save(first.state_dict(), path)
    for state in (first.state_dict(), torch.load(path, weights_only=False)):
        second.load_state_dict(state)
        for a, b in zip(weights(first), weights(second), strict=True):
            same(a, b)
        stepped(second)


# -- ShardedTensors -------------------------------------------------------------------------------


def spec(place: Place, kind: str | None = None, dim: int = 0) -> ChunkShardingSpec:
    kind = kind or place.kind
    index = ":0" if kind == "cuda" else ""
    return ChunkShardingSpec(dim, [f"rank:{rank}/{kind}{index}" for rank in range(place.size)])


@CHECKS()
def shards_are_made_and_moved(place: Place) -> None:
    x = numbers(place, 7, 3)
    here: Any = sharded.from_full_tensor(x.cpu(), spec(place, "cpu"))
    for made in (
        sharded.rand(spec(place), 7, 3),
        ShardedTensor(spec(place), 7, 3),
        sharded.shard_tensor(x, spec(place)),
        here.to(place.device),
        *([here.cuda()] if place.cuda else []),
    ):
        on_device(place, *(shard.tensor for shard in made.local_shards()))
        assert made.shape == (7, 3)
    there = here.to(place.device)
    same((there * 2).full_tensor(), x * 2)
    back = there.cpu()
    assert all(shard.tensor.device.type == "cpu" for shard in back.local_shards())
    same(back.full_tensor(), x)
    if place.cuda:
        assert str(there.metadata().shards_metadata[0].placement).startswith("rank:0/cuda")


@CHECKS()
def operators_of_shards(place: Place) -> None:
    x = numbers(place, 7, 3) / 10
    st: Any = sharded.from_full_tensor(x, spec(place))
    same((st * st + 1).full_tensor(), x * x + 1)
    activated: Any = nn.functional.gelu(st)
    close(activated.full_tensor(), nn.functional.gelu(x))
    close(st.sum(), x.sum())
    close(st.softmax(1).full_tensor(), x.softmax(1))
    same(nn.functional.embedding(torch.tensor([0, 6], device=place.device), st), x[[0, 6]])
    close(nn.functional.linear(x, st), nn.functional.linear(x, x), 1e-4)
    same(copy.deepcopy(st).fill_(2).full_tensor(), torch.full((7, 3), 2.0))
    same(st.reshard(spec(place, dim=1)).full_tensor(), x)
    out = torch.zeros_like(x)
    st.gather(0, out if place.rank == 0 else None)
    same(out, x if place.rank == 0 else out)
    torch.manual_seed(0)
    layer = nn.Linear(3, 4).to(place.device)
    expected = layer(x)
    sharded.shard_parameter(layer, "weight", spec(place))
    y: Any = layer(x)
    close(y.full_tensor() if hasattr(y, "full_tensor") else y, expected, 1e-4)


@CHECKS()
def shards_in_checkpoints(place: Place) -> None:
    folder, x = place.own_folder("sharded") / "saved", numbers(place, 7, 3)
    checkpoint.save({"table": sharded.from_full_tensor(x, spec(place))}, folder)
    for kind in ("cpu", place.kind):
        into = {"table": sharded.zeros(spec(place, kind), 7, 3)}
        checkpoint.load(folder, into=into)
        assert all(shard.tensor.device.type == kind for shard in into["table"].local_shards())
        same(into["table"].full_tensor(), x)
    dist.barrier()
