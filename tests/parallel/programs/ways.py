"""The ways to run a training program on ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

import tilework.distributed as dist
from tests.parallel.programs.kinds import Program
from tests.parallel.sides import OnRanks, sharded, synchronised
from tilework.dtensor import (
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from tilework.parallel import (
    ColwiseParallel,
    DistributedDataParallel,
    RowwiseParallel,
    parallelize_module,
)


def replicas(program: Program) -> OnRanks:
    group = dist.get_default_group()
    return OnRanks(
        lambda model: DistributedDataParallel(
            synchronised(model, group), find_unused_parameters=program.unused, bucket_cap_mb=0.0005
        ),
        group,
    )


def spread(program: Program) -> OnRanks:
    side = replicas(program)
    side.spreads = True
    return side


def shards(names: Callable[[Program], tuple[str, ...]], *shape: int, **options: Any) -> Any:
    def way(program: Program) -> OnRanks:
        mesh = init_device_mesh(program.device, shape) if shape else None
        group = dist.get_default_group()
        return OnRanks(
            lambda model: sharded(synchronised(model, group), names(program), mesh, **options),
            group,
        )

    return way


STYLES: dict[str, Callable[[], Any]] = {
    "columns": ColwiseParallel,
    "rows": RowwiseParallel,
    "gathered": lambda: ColwiseParallel(output_layouts=Replicate()),
}


def cut(model: Any, program: Program, mesh: Any) -> Any:
    plan = {name: STYLES[kind]() for name, kind in program.plan.items()}
    return parallelize_module(model, mesh, plan)


def tensor_parallel(program: Program) -> OnRanks:
    mesh = init_device_mesh(program.device, (dist.get_world_size(),))
    return OnRanks(lambda model: cut(model, program, mesh))


def both(shards: bool) -> Callable[[Program], OnRanks]:
    def way(program: Program) -> OnRanks:
        mesh = init_device_mesh(program.device, (2, 2), mesh_dim_names=("dp", "tp"))

        def wrap(model: Any) -> Any:
            cut(model, program, mesh["tp"])
            if shards:
                return sharded(model, program.blocks, mesh["dp"])
            return DistributedDataParallel(model, device_mesh=mesh["dp"])

        return OnRanks(wrap, mesh["dp"].get_group(0))

    return way


def distributed(program: Program) -> OnRanks:
    mesh = init_device_mesh(program.device, (dist.get_world_size(),))
    known: dict[nn.Parameter, nn.Parameter] = {}

    def place(name: str, module: nn.Module, mesh: Any) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in known:
                value = distribute_tensor(parameter, mesh, [Shard(0)])
                known[parameter] = nn.Parameter(value, parameter.requires_grad)
            setattr(module, key, known[parameter])

    return OnRanks(lambda model: distribute_module(model, mesh, place), distributes=mesh)


@dataclass
class Way:
    """A way of training, on so many ranks, for the programs that it fits, or only these kinds."""

    side: Callable[[Program], OnRanks]
    ranks: int = 2
    fits: Callable[[Program], bool] = lambda program: True
    kinds: tuple[str, ...] = ()


WAYS = {
    "replicas": Way(replicas),
    "replicas, states spread": Way(
        spread, 3, kinds=("perceptron", "residual", "accumulated", "scheduled", "autocast", "bags")
    ),
    "shards of the whole": Way(shards(lambda p: ()), 3),
    "shards of blocks": Way(shards(lambda p: p.blocks)),
    "shards that are kept": Way(
        shards(lambda p: p.blocks, reshard_after_forward=False),
        kinds=("convolutions", "tied", "accumulated", "averaged", "penalised", "adapted"),
    ),
    "nested shards": Way(shards(lambda p: p.within + p.blocks), 2, lambda p: bool(p.within)),
    "shards and replicas": Way(shards(lambda p: p.blocks, 2, 2), 4),
    "tensor parallelism": Way(tensor_parallel, 2, lambda p: bool(p.plan)),
    "replicas of tensor parallelism": Way(both(False), 4, lambda p: bool(p.plan)),
    "shards of tensor parallelism": Way(both(True), 4, lambda p: bool(p.plan)),
    "distributed": Way(distributed),
}
