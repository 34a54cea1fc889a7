"""A ``coalescing_manager`` block takes the program's collectives, and none of the library's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

import tilework.distributed as dist
from tests.tables import each
from tilework.comm.agreement import agree
from tilework.distributed import functional
from tilework.dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from tilework.parallel import DistributedDataParallel, fully_shard
from tilework.sharded import ChunkShardingSpec
from tilework.sharded import rand as sharded_rand
from tilework.testing import run_ranks


def test_the_block_takes_the_collectives_that_the_program_calls() -> None:
    def program(rank: int) -> list[list[float]]:
        x, y, z = (torch.full((2,), rank + 1.0) for _ in range(3))
        gathered, scattered = torch.zeros(4), torch.zeros(1)
        with dist.coalescing_manager(async_ops=True) as block:
            dist.all_reduce(x)
            assert dist.broadcast(y, 1, async_op=True) is None
            dist.all_gather_into_tensor(gathered, z)
            dist.reduce_scatter_tensor(scattered, torch.full((2,), rank + 1.0))
            dist.all_reduce(torch.ones(2).as_subclass(Sub))
            exec("all_reduce(ones)", {"all_reduce": dist.all_reduce, "ones": torch.ones(1)})
        assert len(block.works) == 6
        block.wait()
        return [each.tolist() for each in (x, y, gathered, scattered)]

    for backend in ("shm", "threads"):
        expected = [[3.0, 3.0], [2.0, 2.0], [1.0, 1.0, 2.0, 2.0], [3.0]]
        assert run_ranks(2, program, backend=backend) == [expected] * 2


class Sub(torch.Tensor):
    """A user's class, which the core leaves to Python."""


def _objects(rank: int) -> Any:
    gathered: list[Any] = [None, None]
    listed: list[Any] | None = [None, None] if rank == 0 else None
    sent, own = ["ab" * rank], [None]
    dist.all_gather_object(gathered, "x" * rank)
    dist.gather_object(rank, listed)
    dist.broadcast_object_list(sent, src=1)
    dist.scatter_object_list(own, ["a", "a"] if rank == 0 else None)
    return gathered, listed or [0, 1], sent, own


def _dtensors(rank: int) -> Any:
    x = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (2,)), [Shard(0)])
    norms = torch._foreach_norm([x, x])
    return x.redistribute(placements=[Replicate()]).tolist(), [
        round(norm.item(), 3) for norm in norms
    ]


def _sharded(rank: int) -> Any:
    x = sharded_rand(ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), 4, 2)
    return (x.full_tensor().shape, (x + 1).sum().item() > 8)


def _trained(wrap: Callable[[nn.Module], Any]) -> Callable[[int], Any]:
    def train(rank: int) -> Any:
        model = nn.Linear(2, 1)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        wrapped: Any = wrap(model) or model
        torch.autograd.backward(wrapped(torch.full((1, 2), rank + 1.0)).sum())
        gradient: Any = next(iter(wrapped.parameters())).grad
        return (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient).tolist()

    return train


RESULTS: dict[str, Any] = {
    "agreement": (agree, [0, 1]),
    "functional": (lambda rank: (functional.all_reduce(torch.ones(1)) * 2).tolist(), [4.0]),
    "objects": (_objects, (["", "x"], [0, 1], ["ab"], ["a"])),
    "dtensors": (_dtensors, ([0.0, 1.0, 2.0, 3.0], [3.742] * 2)),
    "sharded": (_sharded, ((4, 2), True)),
    "ddp": (_trained(DistributedDataParallel), [[1.5, 1.5]]),
    "fully_shard": (_trained(fully_shard), [[1.5, 1.5]]),
}


@each("name", RESULTS)
def test_results_of_the_librarys_own_collectives_can_be_used(name: str) -> None:
    compute: Callable[[Any], Any]
    compute, expected = RESULTS[name]

    def program(rank: int) -> Any:
        x = torch.full((2,), rank + 1.0)
        with dist.coalescing_manager() as block:
            dist.all_reduce(x)
            result = compute((lambda: rank) if name == "agreement" else rank)
            assert len(block.works) == 1
        assert x.tolist() == [3.0, 3.0]
        return result

    assert run_ranks(2, program, backend="shm") == [expected] * 2


def test_collectives_that_a_function_of_torch_calls_block() -> None:
    def program(rank: int) -> list[float]:
        x = torch.ones(1)
        with dist.coalescing_manager():
            tree_map(dist.all_reduce, [x])
            return (x * 2).tolist()

    assert run_ranks(2, program, backend="shm") == [[4.0]] * 2
