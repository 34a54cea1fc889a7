"""Small programs of torch.distributed's users, with tilework's imports: they give what torch gives.

What they use was missing once. The results are those of torch 2.13 on Gloo, on rank 0 of two.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import tilework.distributed as distributed
import tilework.dtensor as dtensor
import tilework.parallel as parallel
from tests.tables import each
from tilework.distributed import functional as functional_collectives
from tilework.distributed import nn as dist_nn
from tilework.mesh import DeviceMesh as OurMesh
from tilework.mesh import init_device_mesh
from tilework.testing import run_ranks

# Programs name parameters as torch does, which type checkers do not know.
dist: Any = distributed
funcol: Any = functional_collectives
DeviceMesh: Any = OurMesh


def mesh(*names: str) -> Any:
    shape = (2,) + (1,) * (len(names) - 1)
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def all_gather_single(rank: int) -> list[float]:
    output = torch.zeros(6)
    dist.all_gather_single(output, torch.ones(3))
    return output.tolist()


def reduce_scatter_single(rank: int) -> list[float]:
    output = torch.zeros(2)
    dist.reduce_scatter_single(output, torch.ones(4))
    return output.tolist()


def objects_in_batches(rank: int) -> list[Any]:
    objects = [None, None] if rank == 0 else [1, "a"]
    if rank == 0:
        dist.recv_object_list(objects, src=1, use_batch=True)
    else:
        dist.send_object_list(objects, dst=0, use_batch=True)
    return objects


def barrier_with_timeout(rank: int) -> Any:
    return dist.barrier(timeout=timedelta(seconds=120))


def unsorted_group(rank: int) -> int:
    group = dist.new_group([1, 0], sort_ranks=False)
    return int(dist.get_rank(group))


def methods_of_groups(rank: int) -> list[Any]:
    group, summed, gathered = dist.group.WORLD, torch.ones(2), torch.zeros(4)
    group.allreduce([summed]).wait()
    group._allgather_base(gathered, torch.full((2,), 2.0)).wait()
    return [summed.tolist(), gathered.tolist()]


def extended_stores(rank: int) -> list[Any]:
    store = dist.HashStore()
    store.append("k", "1")
    store.append("k", "2")
    store.multi_set(["a", "b"], ["1", "2"])
    found = [each.decode() for each in store.multi_get(["a", "b"])]
    return [store.get("k").decode(), found, store.has_extended_api()]


def queues_of_stores(rank: int) -> list[Any]:
    store = dist.HashStore()
    store.queue_push("q", "1")
    return [store.queue_len("q"), store.queue_pop("q").decode()]


def cloned_stores(rank: int) -> bool:
    store = dist.HashStore()
    store.set("k", "v")
    return bool(store.clone().get("k") == b"v")


def probes(rank: int) -> list[Any]:
    return [
        dist.is_available(),
        dist.is_torchelastic_launched(),
        dist.supports_complex(dist.ReduceOp.SUM),
        dist.is_xccl_available(),
    ]


def named_collectives(rank: int) -> float:
    x = torch.ones(1)
    with dist.record_comm("mine"):
        dist.all_reduce(x)
    return x.item()


def flattened(rank: int) -> list[int]:
    flat = mesh("a", "b")._flatten("ab")
    return [flat.size(), mesh("a", "b")["a"].size()]


def unflattened(rank: int) -> list[Any]:
    parts = mesh("a")._unflatten(0, (1, 2), ("a", "b"))
    return [list(parts.shape), list(parts.mesh_dim_names)]


def joined(rank: int) -> list[int]:
    whole = mesh("a", "b")
    return list(DeviceMesh._concatenate([whole["b"], whole["a"]]).shape)


def overridden_backend(rank: int) -> str:
    made = init_device_mesh("cpu", (2,), mesh_dim_names=("a",), backend_override={"a": "threads"})
    return distributed.get_backend(made.get_group("a"))


def reduce_op_by_keyword(rank: int) -> list[float]:
    found = funcol.all_reduce(torch.ones(2), reduceOp="sum", group=dist.group.WORLD)
    return [float(value) for value in found]


def gathered_on_a_mesh(rank: int) -> list[float]:
    found = funcol.all_gather_tensor(torch.ones(2), gather_dim=0, group=mesh("tp"))
    return [float(value) for value in found]


def differentiable(rank: int) -> list[float]:
    x = torch.ones(4, requires_grad=True)
    funcol.reduce_scatter_tensor_autograd(x, "sum", 0, dist.group.WORLD).sum().backward()
    assert x.grad is not None
    return x.grad.tolist()


def lists_of_gathered(rank: int) -> list[float]:
    return [each.item() for each in dist_nn.functional.all_gather(torch.tensor(3.0))]


def scattered_sums(rank: int) -> list[float]:
    parts = [torch.ones(2), torch.ones(2)]
    found: list[float] = dist_nn.functional.reduce_scatter(torch.zeros(2), parts).tolist()
    return found


def exchanged(rank: int) -> list[Any]:
    outputs = [torch.zeros(1), torch.zeros(1)]
    inputs = [torch.tensor([0.0]), torch.tensor([1.0])]
    return [each.tolist() for each in dist_nn.functional.all_to_all(outputs, inputs)]


def exchanged_in_one(rank: int) -> list[float]:
    found = dist_nn.functional.all_to_all_single(torch.zeros(2), torch.arange(2.0))
    return [float(value) for value in found]


def implicit_replication(rank: int) -> list[float]:
    x = dtensor.distribute_tensor(torch.ones(4), mesh("tp"), [dtensor.Shard(0)])
    with dtensor.implicit_replication():
        total: Any = x + torch.ones(4)
    return [float(value) for value in total.full_tensor()]


def counted(rank: int) -> int:
    x = dtensor.distribute_tensor(torch.ones(4), mesh("tp"), [dtensor.Shard(0)])
    with dtensor.CommDebugMode() as comm:
        x.full_tensor()
    return comm.get_total_counts()


def pictured(rank: int) -> None:
    x = dtensor.distribute_tensor(torch.ones(4, 4), mesh("tp"), [dtensor.Shard(0)])
    return dtensor.visualize_sharding(x, header="x", use_rich=False)


class OwnStyle(parallel.ParallelStyle):
    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        return dtensor.distribute_module(module, device_mesh)


def own_style(rank: int) -> list[int]:
    plan = {"0": OwnStyle()}
    model = parallel.parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh("tp"), plan)
    (weight, _) = model.parameters()
    return list(weight.shape)


def replicas(**settings: Any) -> Any:
    return parallel.DistributedDataParallel(nn.Linear(2, 2), **settings)


def new_settings_of_replicas(rank: int) -> bool:
    model = replicas(skip_all_reduce_unused_params=True, bucket_cap_mb_list=[1, 2])
    model(torch.ones(1, 2)).sum().backward()
    return model.module.weight.grad is not None


def built_in_hook(rank: int) -> bool:
    model = replicas()
    model._register_builtin_comm_hook(SimpleNamespace(name="FP16_COMPRESS"))
    model(torch.ones(1, 2)).sum().backward()
    return model.module.weight.grad is not None


def controls_of_shards(rank: int) -> list[str]:
    model: Any = parallel.fully_shard(nn.Linear(4, 4), mesh=mesh("dp"))
    settings = ("requires_gradient_sync", "requires_all_reduce", "is_last_backward")
    return [name for name in settings if getattr(model, f"set_{name}")(True) is None]


def recomputed(rank: int) -> list[str]:
    layer = parallel.checkpoint_wrapper(nn.Linear(2, 2))
    layer(torch.ones(1, 2, requires_grad=True)).sum().backward()
    return list(layer.state_dict())


def norm_without_bias(rank: int) -> bool:
    return parallel.SyncBatchNorm(2, bias=False).bias is None


PROGRAMS: list[tuple[Callable[[int], Any], Any]] = [
    (all_gather_single, [1.0] * 6),
    (reduce_scatter_single, [2.0, 2.0]),
    (objects_in_batches, [1, "a"]),
    (barrier_with_timeout, None),
    (unsorted_group, 1),
    (methods_of_groups, [[2.0, 2.0], [2.0, 2.0, 2.0, 2.0]]),
    (extended_stores, ["12", ["1", "2"], True]),
    (queues_of_stores, [1, "1"]),
    (cloned_stores, True),
    (probes, [True, False, True, False]),
    (named_collectives, 2.0),
    (flattened, [2, 2]),
    (unflattened, [[1, 2], ["a", "b"]]),
    (joined, [1, 2]),
    (overridden_backend, "threads"),
    (reduce_op_by_keyword, [2.0, 2.0]),
    (gathered_on_a_mesh, [1.0, 1.0, 1.0, 1.0]),
    (differentiable, [1.0, 1.0, 1.0, 1.0]),
    (lists_of_gathered, [3.0, 3.0]),
    (scattered_sums, [2.0, 2.0]),
    (exchanged, [[0.0], [0.0]]),
    (exchanged_in_one, [0.0, 0.0]),
    (implicit_replication, [2.0, 2.0, 2.0, 2.0]),
    (counted, 1),
    (pictured, None),
    (own_style, [4, 4]),
    (new_settings_of_replicas, True),
    (built_in_hook, True),
    (controls_of_shards, ["requires_gradient_sync", "requires_all_reduce", "is_last_backward"]),
    (recomputed, ["weight", "bias"]),
    (norm_without_bias, True),
]


@each(("program", "expected"), PROGRAMS)
def test_a_program_gives_what_torch_gives(program: Callable[[int], Any], expected: Any) -> None:
    assert run_ranks(2, program)[0] == expected
