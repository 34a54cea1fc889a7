"""Programs of two ranks: data parallelism, sharding, tensor parallelism, collectives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as lrs

import tilework.distributed as dist
from tests.capture.ordinary.data import mlp, rows
from tests.capture.ordinary.models import NanoGPT
from tests.capture.ordinary.running import Capture, Made, calls, fitted, program, states
from tilework.dtensor import DTensor, Shard, distribute_module, distribute_tensor
from tilework.mesh import init_device_mesh
from tilework.parallel import (
    ColwiseParallel,
    DistributedDataParallel,
    MixedPrecisionPolicy,
    RowwiseParallel,
    SyncBatchNorm,
    ZeroRedundancyOptimizer,
    clip_grad_norm_,
    fully_shard,
    parallelize_module,
)

LENGTHS = (4, 4, 6, 9, 5, 8, 12, 3, 7, 4)
Wrap = Callable[[nn.Sequential], Any]


def replicas(model: nn.Module, **settings: Any) -> Any:
    return DistributedDataParallel(model, **settings)


def shards(model: Any, **settings: Any) -> Any:
    for block in model:
        if isinstance(block, nn.Linear):
            fully_shard(block, **settings)
    return fully_shard(model, **settings)


def tensors(model: Any) -> Any:
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


def distributed(model: Any) -> Any:
    return distribute_module(model, init_device_mesh("cpu", (2,)))


def local(count: int = 8) -> list[tuple[Tensor, ...]]:
    """Batches that differ between ranks."""
    return [(x + dist.get_rank(),) for (x,) in rows(8, 6, count=count)]


def trained(
    wrap: Wrap, capture: Capture, change: Any = None, batches: Any = None, clips: bool = True
) -> list[Any]:
    """The usual step on a wrapped model; ``change(model, opt, number)`` runs after each call."""
    model = wrap(mlp(6, 8, 2))
    opt = torch.optim.AdamW(model.parameters(), 0.01)

    def step(x: Tensor) -> Any:
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0) if clips else None
        opt.step()
        return loss.detach(), norm

    after = None if change is None else lambda number: change(model, opt, number)
    batches = batches or (rows(8, 6, count=10) if wrap in (tensors, distributed) else local(10))
    return [*calls(capture(step), batches, after), *states(model, opt)]


WAYS: dict[str, Wrap] = {"ddp": replicas, "fully_shard": shards, "tp": tensors}


def of_lengths(wrap: Wrap, capture: Capture) -> list[Any]:
    return trained(wrap, capture, batches=[(torch.randn(n, 6),) for n in LENGTHS])


def of_own_lengths(wrap: Wrap, capture: Capture) -> list[Any]:
    """Each rank has batches of other lengths than the other rank."""
    lengths = LENGTHS if dist.get_rank() else LENGTHS[::-1]
    return trained(wrap, capture, batches=[(torch.randn(n, 6),) for n in lengths * 2])


def frozen(wrap: Wrap, capture: Capture) -> list[Any]:
    def change(model: Any, opt: Any, number: int) -> None:
        if number in (4, 7):
            next(iter(model.parameters())).requires_grad_(number == 7)

    return trained(partial(wrap, find_unused_parameters=True) if wrap is replicas else wrap,
                   capture, change)  # fmt: skip


def scheduled(wrap: Wrap, capture: Capture) -> list[Any]:
    schedulers: list[Any] = []

    def change(model: Any, opt: Any, number: int) -> None:
        if not schedulers:
            schedulers.append(lrs.CosineAnnealingLR(opt, 12))
        schedulers[0].step()

    return trained(wrap, capture, change)


def scaled(wrap: Wrap, capture: Capture) -> list[Any]:
    """A GradScaler that meets an overflow."""
    model = wrap(mlp(6, 8, 2))
    opt = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)

    def step(x: Tensor) -> Any:
        opt.zero_grad()
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        return loss.detach()

    batches = rows(8, 6, count=10)
    if dist.get_rank() == 0 or wrap is tensors:
        batches[5][0][0, 0] = float("inf")
    return [*calls(capture(step), batches), *states(model, opt), scaler.get_scale()]


for way, wrap in WAYS.items():
    program(name=f"{way}_with_clipping", ranks=2)(partial(trained, wrap))
    program(name=f"{way}_of_varying_lengths", ranks=2)(partial(of_lengths, wrap))
    program(name=f"{way}_with_a_frozen_layer", ranks=2)(partial(frozen, wrap))
    program(name=f"{way}_with_a_scheduler", ranks=2)(partial(scheduled, wrap))
    program(name=f"{way}_with_grad_scaler", ranks=2)(partial(scaled, wrap))

for way in ("ddp", "fully_shard"):
    named = f"{way}_of_own_lengths_on_each_rank"
    program(name=named, ranks=2)(partial(of_own_lengths, WAYS[way]))

SETTINGS: dict[str, Wrap] = {
    "ddp_with_gradients_as_views": partial(replicas, gradient_as_bucket_view=True),
    "ddp_with_a_static_graph": partial(replicas, static_graph=True),
    "fully_shard_in_bfloat16": partial(
        shards, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    ),
    "fully_shard_that_keeps_parameters": partial(shards, reshard_after_forward=False),
    "distribute_module": distributed,
}
for name, wrap in SETTINGS.items():
    program(name=name, ranks=2)(partial(trained, wrap, clips=wrap is not distributed))


@fitted(ranks=2)
def ddp_with_noise_on_gradients() -> Made:
    model = DistributedDataParallel(mlp(6, 8, 2))
    generator = torch.Generator().manual_seed(
        dist.get_rank()
    )  # on threads, hooks share torch's own
    p: Any
    for p in model.parameters():
        p.register_hook(lambda g: g + 0.01 * torch.randn(g.shape, generator=generator))
    return (model, lambda x: model(x).square().mean(), local())


@program(ranks=2)
def ddp_with_accumulation(capture: Capture) -> list[Any]:
    model = DistributedDataParallel(mlp(6, 128, 64))  # a large gradient lies in the bucket
    opt = torch.optim.AdamW(model.parameters(), 0.01)

    def step(x: Tensor, y: Tensor) -> Any:
        opt.zero_grad()
        with model.no_sync():
            (model(x).square().mean() / 2).backward()
        loss = model(y).square().mean() / 2
        loss.backward()
        opt.step()
        return loss.detach()

    batches = [(x, y) for (x,), (y,) in zip(local(), local(), strict=True)]
    return [*calls(capture(step), batches), *states(model, opt)]


@fitted(ranks=2)
def ddp_with_synchronised_batch_norm() -> Made:
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    model = DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(net))
    return (model, lambda x: model(x).square().mean(), local())


@fitted(ranks=2)
def ddp_with_zero_optimizer() -> Made:
    model = DistributedDataParallel(mlp(6, 8, 2))
    opt: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    return (model, lambda x: model(x).square().mean(), local(), opt)


@fitted(ranks=2)
def ddp_nano_gpt() -> Made:
    model = DistributedDataParallel(NanoGPT())
    batches = [(torch.randint(16, (2, n)),) for n in LENGTHS]
    return (model, lambda ids: model(ids, ids)[1], batches)


@program(ranks=2)
def ema_of_shards(capture: Capture) -> list[Any]:
    shadow: dict[str, Any] = {}

    def change(model: nn.Module, opt: Any, number: int) -> None:
        for name, p in model.named_parameters():
            shadow[name] = shadow.get(name, p.detach()) * 0.9 + p.detach() * 0.1
            if number == 6:
                p.data = shadow[name].clone()

    return [*trained(shards, capture, change), *states(shadow)]


@program(ranks=2)
def rows_of_a_distributed_tensor(capture: Capture) -> list[Any]:
    mesh = init_device_mesh("cpu", (2,))
    model = distribute_module(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU()), mesh)
    opt = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: DTensor) -> Any:
        opt.zero_grad()
        loss: Any = model(x).square().mean()
        loss.backward()
        opt.step()
        return loss.full_tensor().detach()

    batches = [(distribute_tensor(torch.randn(n, 6), mesh, [Shard(0)]),) for n in LENGTHS]
    return [*calls(capture(step), batches), *states(model)]


@program(ranks=2)
def new_data_of_a_distributed_parameter(capture: Capture) -> list[Any]:
    def change(model: Any, opt: Any, number: int) -> None:
        if number in (5, 7):
            p = next(iter(model.parameters()))
            p.data = p.data * 0.5

    return trained(tensors, capture, change)


@program(ranks=2)
def gradients_averaged_by_hand(capture: Capture) -> list[Any]:
    model = mlp(6, 8, 2)
    opt = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor) -> Any:
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        for p in model.parameters():
            assert p.grad is not None
            dist.all_reduce(p.grad, dist.ReduceOp.AVG)
        opt.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        return mean

    return [*calls(capture(step), local()), *states(model)]


@program(ranks=2)
def a_pipeline_by_hand(capture: Capture) -> list[Any]:
    rank = dist.get_rank()
    model = mlp(6, 6) if rank == 0 else mlp(6, 2)
    opt = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor) -> Any:
        opt.zero_grad()
        if rank == 0:
            out = model(x)
            dist.send(out.detach(), 1)
            grad = torch.empty_like(out)
            dist.recv(grad, 1)
            out.backward(grad)
            loss = None
        else:
            got: Any = torch.empty(8, 6)
            dist.recv(got, 0)
            got.requires_grad_()
            value = model(got).square().mean()
            value.backward()
            dist.send(got.grad, 0)
            loss = value.detach()
        opt.step()
        return loss

    return [*calls(capture(step), local()), *states(model)]
