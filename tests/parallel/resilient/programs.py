"""Small training programs, whose losses do not depend on the number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tilework.distributed as dist
from tilework.mesh import DeviceMesh, init_device_mesh
from tilework.parallel import (
    ColwiseParallel,
    DistributedDataParallel,
    Resilient,
    RowwiseParallel,
    Schedule,
    ZeroRedundancyOptimizer,
    fully_shard,
    parallelize_module,
    pipeline,
)
from tilework.testing import run_ranks

ROWS, WIDTH = 12, 8
State = dict[str, Any]


def network() -> nn.Module:
    """The same on all ranks, which may be threads: they share torch's own generator."""
    module = nn.Sequential(nn.Linear(WIDTH, 10), nn.Tanh(), nn.Linear(10, 3))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return module


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, 3, generator=generator)


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.05)


def build_replicated() -> State:
    model = DistributedDataParallel(network())
    optimizer = adam(model)
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9),
    }


def build_zero() -> State:
    model = DistributedDataParallel(network())
    return {
        "model": model,
        "optimizer": ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.05),
    }


def build_sharded() -> State:
    model = network()
    for layer in (model[0], model[2]):  # type: ignore[index]
        fully_shard(layer)
    fully_shard(model)
    return {"model": model, "optimizer": adam(model)}


def build_tensor_parallel() -> State:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return {"model": model, "optimizer": adam(model)}


def build_both() -> State:
    """Replicas of a model that ranks share, two by two where that can be."""
    pairs = 2 if dist.get_world_size() % 2 == 0 else 1
    shape = (dist.get_world_size() // pairs, pairs)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model = parallelize_module(
        network(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )
    ddp = DistributedDataParallel(model, device_mesh=mesh["dp"])
    return {"model": ddp, "optimizer": adam(ddp), "mesh": Place(mesh)}


def build_pipelined() -> State:
    """Two or three stages; the one in the middle has no parameters."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    plan = Schedule.one_forward_one_backward(ranks, 2)
    stages = pipeline(network(), mesh, split=["1", "2"][3 - ranks :], schedule=plan)
    groups = [{"params": stages.parameters()}]
    return {"stages": stages, "optimizer": torch.optim.Adam(groups, lr=0.05)}


class Place:
    """The mesh, which the step needs; nothing of it is kept."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State) -> None:
        pass


BUILDS: dict[str, Callable[[], State]] = {
    "replicated": build_replicated,
    "zero": build_zero,
    "sharded": build_sharded,
    "tensor parallel": build_tensor_parallel,
    "both": build_both,
    "pipelined": build_pipelined,
}


def train_step(loop: Resilient[float], state: State, number: int, divided: bool) -> float:
    x, y = batch(number)
    rows, weight = slice(None), 1.0
    if "mesh" in state:
        mesh = state["mesh"].mesh
        parts, here = mesh["dp"].size(), mesh["dp"].get_local_rank()
        rows = slice(here * ROWS // parts, (here + 1) * ROWS // parts)
        weight = (rows.stop - rows.start) * parts / ROWS
    elif divided:
        rows, weight = loop.share(ROWS), loop.weight(ROWS)
    state["optimizer"].zero_grad()
    if "stages" in state:
        total: Tensor = state["stages"].step(x, target=y, loss=F.mse_loss)
        state["optimizer"].step()
        return total.item()
    loss = F.mse_loss(state["model"](x[rows]), y[rows]) * weight
    torch.autograd.backward(loss)
    state["optimizer"].step()
    if "schedule" in state:
        state["schedule"].step()
    total = loss.detach().clone()
    if divided:
        dist.all_reduce(total, op=dist.ReduceOp.AVG)
    return total.item()


def make_loop(
    kind: str | Callable[[], State], disturb: Callable[[int], None], **options: Any
) -> Resilient[float]:
    """A loop that calls ``disturb(number)`` in the middle of each step."""
    divided = kind != "tensor parallel"

    def step(state: State, number: int) -> float:
        disturb(number)
        return train_step(loop, state, number, divided)

    build = BUILDS[kind] if isinstance(kind, str) else kind
    loop: Resilient[float] = Resilient(build, step, **options)
    return loop


def undisturbed(kind: str, steps: int) -> list[float]:
    """The losses that one rank computes."""

    def program(rank: int) -> list[float]:
        return [loss for _, loss in make_loop(kind, lambda number: None).run(steps)]

    return run_ranks(1, program)[0]
