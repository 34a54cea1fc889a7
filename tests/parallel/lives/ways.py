"""What wraps the model of a life."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

import tilework.distributed as dist
from tests.parallel.sides import OnRanks, sharded, synchronised
from tilework.dtensor import Shard, distribute_module, distribute_tensor, init_device_mesh
from tilework.parallel import (
    ColwiseParallel,
    DistributedDataParallel,
    RowwiseParallel,
    fully_shard,
    parallelize_module,
)

BLOCKS = ("first", "second")
NESTED = ("first.up", "second.down", "first", "second", "head")


def replicas(spreads: bool = False, **options: Any) -> Callable[[], OnRanks]:
    def side() -> OnRanks:
        group = dist.get_default_group()

        def wrap(model: Any) -> Any:
            model = synchronised(model, group)
            return DistributedDataParallel(model, bucket_cap_mb=0.0003, **options)

        return OnRanks(wrap, group, spreads)

    return side


def shards(*names: str, shape: tuple[int, ...] = (), **options: Any) -> Callable[[], OnRanks]:
    def side() -> OnRanks:
        group = dist.get_default_group()
        mesh = init_device_mesh("cpu", shape) if shape else None
        return OnRanks(lambda m: sharded(synchronised(m, group), names, mesh, **options), group)

    return side


def listed() -> OnRanks:
    """Both blocks are gathered together."""
    group = dist.get_default_group()

    def wrap(model: Any) -> Any:
        model = synchronised(model, group)
        fully_shard([model.first, model.second])
        return fully_shard(model)

    return OnRanks(wrap, group)


def cut(model: Any, mesh: Any) -> Any:
    plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


def tensor_parallel() -> OnRanks:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return OnRanks(lambda model: cut(model, mesh))


def beside_tensor_parallel(shards: bool) -> Callable[[], OnRanks]:
    def side() -> OnRanks:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        group = mesh["dp"].get_group(0)

        def wrap(model: Any) -> Any:
            model = cut(synchronised(model, group), mesh["tp"])
            if shards:
                return sharded(model, BLOCKS, mesh["dp"])
            return DistributedDataParallel(
                model, device_mesh=mesh["dp"], find_unused_parameters=True
            )

        return OnRanks(wrap, group)

    return side


def distributed() -> OnRanks:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def place(name: str, module: nn.Module, mesh: Any) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            value = distribute_tensor(parameter, mesh, [Shard(parameter.ndim - 1)])
            setattr(module, key, nn.Parameter(value, parameter.requires_grad))

    return OnRanks(lambda model: distribute_module(model, mesh, place), distributes=mesh)


@dataclass
class Way:
    """A way of wrapping.

    Attributes:
        side: The ranks' side of the comparison; called on each rank.
        groups: The parts that the rows are cut into, for a number of ranks.
        ranks: The numbers of ranks that it is for.
    """

    side: Callable[[], OnRanks]
    groups: Callable[[int], int] = lambda ranks: ranks
    ranks: tuple[int, ...] = (2, 3, 4)


WAYS = {
    "ddp": Way(replicas()),
    "ddp unused": Way(replicas(find_unused_parameters=True)),
    "ddp views": Way(replicas(find_unused_parameters=True, gradient_as_bucket_view=True)),
    "zero": Way(replicas(True, find_unused_parameters=True)),
    "root": Way(shards()),
    "blocks": Way(shards(*BLOCKS)),
    "kept": Way(shards(*BLOCKS, reshard_after_forward=False)),
    "nested": Way(shards(*NESTED)),
    "listed": Way(listed),
    "hybrid": Way(shards(*BLOCKS, shape=(2, 2)), ranks=(4,)),
    "tensor": Way(tensor_parallel, lambda ranks: 1, (2, 3)),
    "distributed": Way(distributed, lambda ranks: 1, (2, 3)),
    "ddp tensor": Way(beside_tensor_parallel(False), lambda ranks: 2, (4,)),
    "shards tensor": Way(beside_tensor_parallel(True), lambda ranks: 2, (4,)),
}
