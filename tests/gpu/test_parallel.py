"""Training in parallel on CUDA: the losses and weights of one process with the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tilework.distributed as dist
from tests.gpu.small_models import LAYERS, Layer, inputs, make
from tests.gpu.world import (
    ONE,
    ONE_DEFAULT,
    TWO,
    Checks,
    Place,
    World,
    close,
    in_worlds,
    lacking,
    on_device,
    raising,
    require_device,
    run_checks,
    same,
)
from tests.parallel.programs import training
from tilework.dtensor import DTensor
from tilework.parallel import (
    CPUOffloadPolicy,
    DistributedDataParallel,
    MixedPrecisionPolicy,
    checkpoint_wrapper,
    clip_grad_norm_,
    comm_hooks,
    fully_shard,
)

require_device()
CHECKS = Checks()


@in_worlds(ONE, ONE_DEFAULT, TWO)
def test_parallel(world: World, tmp_path: Path) -> None:
    run_checks(__name__, world, tmp_path)


# -- the training programs of the suite -----------------------------------------------------------

#: Of tests/parallel/programs, which runs all of them on the CPU: ways, and the programs of each.
PROGRAMS = {
    "replicas": "gpt tied convolutions residual accumulated scheduled autocast penalised",
    "replicas, states spread": "perceptron residual",
    "shards of blocks": "gpt tied encoder lstm u-net contrastive accumulated autocast",
    "shards that are kept": "tied accumulated averaged",
    "nested shards": "gpt adapted",
    "tensor parallelism": "gpt encoder perceptron accumulated",
    "distributed": "gpt perceptron",
}


@CHECKS(*((way, kind) for way, kinds in PROGRAMS.items() for kind in kinds.split()))
def programs(place: Place, pair: tuple[str, str]) -> None:
    training.check(pair[1], pair[0], place.kind)


# -- what differs on a device ---------------------------------------------------------------------


def mean(loss: Tensor) -> float:
    value = loss.detach().clone()
    dist.all_reduce(value, dist.ReduceOp.AVG)
    return float(value)


def trained(
    place: Place, model: Any, scaler: Any = None, dtype: Any = None, **settings: Any
) -> list[float]:
    """The losses of the whole batch in each of four steps, of which each rank has some rows."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, **settings)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        rows = inputs(place, "plain", step).chunk(place.size)[place.rank]
        with torch.autocast(place.kind, dtype, enabled=dtype is not None):
            loss = model(rows).float().square().mul(0.3).sin().mean()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e6)
            scaler.step(optimizer)
            scaler.update()
        losses.append(mean(loss))
    on_device(place, *model.parameters())
    return losses


def as_one(place: Place, found: list[float], tolerance: float = 1e-3) -> None:
    """Fail unless losses are those of the plain model with the whole batch."""
    model, losses = make(place, "plain"), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(inputs(place, "plain", step)).square().mul(0.3).sin().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    pairs = list(zip(found, losses, strict=True))
    assert all(abs(a - b) < tolerance for a, b in pairs), pairs


@CHECKS("views", "small buckets", "static", "device_ids")
def ddp(place: Place, way: str) -> None:
    options: dict[str, dict[str, Any]] = {
        "views": {"gradient_as_bucket_view": True},
        "small buckets": {"bucket_cap_mb": 0.002},
        "static": {"static_graph": True},
        "device_ids": {"device_ids": [0], "output_device": 0} if place.cuda else {},
    }
    found = DistributedDataParallel(make(place, "plain"), **options[way])
    as_one(place, trained(place, found))
    on_device(place, *(p.grad for p in found.parameters()))


@CHECKS("bf16", "fp16", "powersgd")
def ddp_hooks(place: Place, hook: str) -> None:
    found = make(place, "ddp")
    if hook == "powersgd":
        state = comm_hooks.PowerSGDState(found.process_group, matrix_approximation_rank=2,
                                         start_powerSGD_iter=2)  # fmt: skip
        found.register_comm_hook(state, comm_hooks.powerSGD_hook)
    else:
        found.register_comm_hook(None, getattr(comm_hooks, f"{hook}_compress_hook"))
    as_one(place, trained(place, found), 0.3)


@CHECKS("no mesh", "on the cpu", "fused", "foreach")
def fsdp(place: Place, way: str) -> None:
    """The mesh is of the parameters' kind of device; parameters on the CPU go to the mesh's."""
    model = make(place, "plain")
    if way == "on the cpu":
        found = fully_shard(model.cpu(), mesh=place.mesh())
    else:
        found = fully_shard(model) if way == "no mesh" else make(place, "fsdp")
    on_device(place, *found.parameters())
    as_one(place, trained(place, found, **({way: True} if way in ("fused", "foreach") else {})))


@CHECKS("bfloat16", "float16", "reduced in float32", "output")
def fsdp_mixed_precision(place: Place, way: str) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.float16 if way == "float16" else torch.bfloat16,
        reduce_dtype=torch.float32 if way == "reduced in float32" else None,
        output_dtype=torch.float32 if way == "output" else None,
    )
    found = fully_shard(make(place, "plain"), mesh=place.mesh(), mp_policy=policy)
    as_one(place, trained(place, found), 0.1)
    assert all(p.dtype is torch.float32 for p in found.parameters())


@CHECKS()
def fsdp_with_offload(place: Place) -> None:
    """Works, or is refused by name before anything has changed."""

    def offloaded() -> Any:
        return fully_shard(make(place, "plain"), offload_policy=CPUOffloadPolicy())

    if not lacking("CPUOffloadPolicy", offloaded):
        trained(place, offloaded())


@CHECKS()
def fsdp_of_a_meta_model(place: Place) -> None:
    with torch.device("meta"):
        found: Any = nn.Sequential(*(Layer(0.0) for _ in range(LAYERS)))
    for layer in found:
        fully_shard(layer, mesh=place.mesh())
    fully_shard(found, mesh=place.mesh())
    found.to_empty(device=place.device)
    torch.manual_seed(0)
    for module in found.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert torch.tensor(trained(place, found)).isfinite().all()


@CHECKS("fsdp", "ddp")
def clipped(place: Place, way: str) -> None:
    plain, found = make(place, "plain"), make(place, way)
    x = inputs(place, way, 0)
    plain(x).square().mean().backward()
    found(x.chunk(place.size)[place.rank]).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    norm: Any = nn.utils.clip_grad_norm_(found.parameters(), 0.1)
    on_device(place, norm)
    close(norm, expected, 1e-4)
    for a, b in zip(found.parameters(), plain.parameters(), strict=True):
        close(a.grad, b.grad, 1e-4)
    close(clip_grad_norm_(found.parameters(), 0.1), torch.tensor(0.1), 1e-3)


@CHECKS("fsdp", "ddp")
def activation_checkpointing(place: Place, way: str) -> None:
    found: Any = make(place, "plain")
    for number, layer in enumerate(found):
        found[number] = checkpoint_wrapper(layer)
    wrapped = fully_shard(found) if way == "fsdp" else DistributedDataParallel(found)
    as_one(place, trained(place, wrapped))


@CHECKS("fsdp", "ddp")
def torchs_activation_checkpointing_with_dropout(place: Place, way: str) -> None:
    """The masks of the second forward pass are those of the first."""
    from torch.utils.checkpoint import checkpoint

    found = make(place, way, dropout=0.5)
    x = inputs(place, way, 0).requires_grad_()
    torch.manual_seed(7)
    checkpoint(found, x, use_reentrant=False).square().sum().backward()
    first, x.grad = x.grad, None
    torch.manual_seed(7)
    found(x).square().sum().backward()
    close(x.grad, first, 1e-4)


@CHECKS("fsdp", "ddp")
def autocast_and_scaler(place: Place, way: str) -> None:
    scaler = torch.amp.GradScaler(place.kind, init_scale=1024.0)
    dtype = torch.float16 if place.cuda else torch.bfloat16
    as_one(place, trained(place, make(place, way), scaler, dtype), 0.1)
    assert scaler.get_scale() == 1024.0


@CHECKS("eager", "aot_eager", seconds=120.0)
def compiled(place: Place, backend: str) -> None:
    as_one(place, trained(place, torch.compile(make(place, "fsdp"), backend=backend)))


# -- memory ---------------------------------------------------------------------------------------


@CHECKS(seconds=120.0)
def memory_of_fully_shard(place: Place) -> None:
    """After a step: shards of parameters, gradients, states; at the peak two layers more."""
    if not place.cuda:
        return
    layers, width = 8, 1024
    one = width * width * 4
    found = nn.Sequential(
        *(nn.Linear(width, width, bias=False, device="cuda") for _ in range(layers))
    )
    for layer in found:
        fully_shard(layer)
    fully_shard(found)
    optimizer = torch.optim.AdamW(found.parameters(), foreach=False)

    def step() -> None:
        optimizer.zero_grad()
        found(torch.ones(4, width, device="cuda")).sum().backward()
        optimizer.step()

    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    held, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    shards = 4 * layers * one / place.size
    layers_of = [round(number / one, 2) for number in (shards, before, held, peak)]
    figures = f"in layers: shards {layers_of[0]}, before and after {layers_of[1:3]}, {layers_of[3]}"
    assert before <= shards + 1.5 * one + (64 << 20), figures
    assert peak <= held + 6 * one, figures
    print(figures)


@CHECKS("fsdp", "ddp", "plan", "dtensor")
def nothing_is_kept(place: Place, way: str) -> None:
    """The memory after 20 more steps is that before them."""
    if not place.cuda:
        return
    found = make(place, way)
    optimizer = torch.optim.AdamW(found.parameters(), lr=0.01)

    def step(number: int) -> None:
        optimizer.zero_grad()
        found(inputs(place, way, number)).square().mean().backward()
        optimizer.step()

    for number in range(5):
        step(number)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for number in range(20):
        step(number)
    torch.cuda.synchronize()
    grown = torch.cuda.memory_allocated() - before
    assert grown <= 1 << 16, f"{grown} bytes more after 20 steps"


@CHECKS()
def memory_of_collectives_is_freed(place: Place) -> None:
    if not place.cuda:
        return
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(5):
        x = torch.ones(1 << 20, device="cuda")
        dist.all_reduce(x)
        work: Any = dist.all_reduce(x, async_op=True)
        work.wait()
        out = torch.zeros(place.size << 20, device="cuda")
        dist.all_gather_into_tensor(out, x, async_op=True)  # nobody waits
    dist.barrier()
    dist.all_reduce(x)
    del x, out, work
    torch.cuda.synchronize()
    import gc
    import time

    for _ in range(20):
        gc.collect()
        if torch.cuda.memory_allocated() <= before + (1 << 20):
            break
        time.sleep(0.1)
    grown = torch.cuda.memory_allocated() - before
    assert grown <= 1 << 20, f"{grown} bytes are kept"


# -- what is wrong --------------------------------------------------------------------------------


@CHECKS()
def a_module_on_another_device_is_refused(place: Place) -> None:
    if not place.cuda:
        return
    found = DistributedDataParallel(nn.Linear(3, 3).cuda())
    with raising("device", RuntimeError, ValueError):
        found(torch.ones(2, 3))
    assert all(isinstance(p, DTensor) for p in make(place, "fsdp").parameters())


@CHECKS()
def inputs_on_the_cpu(place: Place) -> None:
    """torch moves inputs to the device where device_ids are given."""
    if not place.cuda:
        return
    found = DistributedDataParallel(nn.Linear(3, 3).cuda(), device_ids=[0])
    y = found(torch.ones(2, 3))
    on_device(place, y)
    same(y, found.module(torch.ones(2, 3).cuda()))
