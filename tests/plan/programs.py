"""Programs that run on real and on pretended ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tilework.distributed as dist
from tilework.distributed.functional import all_gather_tensor, all_reduce
from tilework.dtensor import Shard, distribute_module, distribute_tensor, explain
from tilework.mesh import init_device_mesh
from tilework.parallel import (
    ColwiseParallel,
    DistributedDataParallel,
    RowwiseParallel,
    Schedule,
    SyncBatchNorm,
    fully_shard,
    parallelize_module,
    pipeline,
)


class Block(nn.Module):
    """A network of two layers with a norm, not of round sizes."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return result


def model_of(layers: int = 2) -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(layers)))


def steps(model: nn.Module, count: int = 2) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(6, 10)).square().mean().backward()
        optimizer.step()


def ddp() -> None:
    steps(DistributedDataParallel(model_of()))


def sharded() -> None:
    model = model_of()
    for block in model:
        fully_shard(block)
    steps(fully_shard(model))


def tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    plan = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
    steps(parallelize_module(model_of(), mesh, plan))


def two_axes() -> None:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(
        model_of(), mesh["tp"], {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
    )
    for block in model.children():
        fully_shard(block, mesh=mesh["dp"])
    steps(fully_shard(model, mesh=mesh["dp"]))


def attention() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    layer = distribute_module(nn.Linear(8, 24, bias=False), mesh)
    x = distribute_tensor(torch.randn(2, 16, 8), mesh, [Shard(1)])
    q, k, v = layer(x).unflatten(-1, (2, 3, 4)).transpose(1, 2).unbind(3)
    F.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean().backward()  # type: ignore[no-untyped-call]


class Masked(nn.Module):
    """Blocks, between which values that other stages have meet inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * mask
        return x


def staged() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    plan = Schedule.one_forward_one_backward(mesh.size(), microbatches=3)
    stages = pipeline(Masked(), mesh, schedule=plan)
    optimizer = torch.optim.SGD(stages.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        x = torch.randn(96, 10)
        stages.step(x, x[:, :1], target=x, loss=F.mse_loss, weight="rows")
        optimizer.step()
        optimizer.zero_grad()


def functional_calls() -> None:
    """Collectives that give new tensors, in layers and called by name, small and large."""
    norm = SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8)))
    steps(DistributedDataParallel(norm))
    x = torch.randn(6, 1 << 12, requires_grad=True)
    whole = all_gather_tensor(x, gather_dim=1)
    total = all_reduce(whole.square().mean(), "sum")
    total.backward()  # type: ignore[no-untyped-call]


_ALL = (ddp, sharded, tensor_parallel, two_axes, attention, staged, functional_calls)
PROGRAMS: dict[str, Callable[[], None]] = {each.__name__: each for each in _ALL}


def explained(program: Callable[[], None]) -> list[tuple[str, tuple[str, ...], int]]:
    """The collectives of DTensors in a program: kind, axes, bytes."""
    with explain() as log:
        program()
    return [(each.collective, each.axes, each.nbytes) for each in log.events]
