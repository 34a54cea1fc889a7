"""Training in parallel on CUDA: the losses and weights of one process with the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tilework.distributed as dist
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
from tilework.dtensor import DTensor, Replicate, Shard, distribute_tensor
from tilework.parallel import (
    ColwiseParallel,
    CPUOffloadPolicy,
    DistributedDataParallel,
    MixedPrecisionPolicy,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    SyncBatchNorm,
    ZeroRedundancyOptimizer,
    checkpoint_wrapper,
    clip_grad_norm_,
    comm_hooks,
    fully_shard,
    loss_parallel,
    parallelize_module,
)

require_device()
CHECKS = Checks()
WORDS, WIDTH, HEADS, ROWS, LENGTH = 32, 16, 4, 12, 8


@in_worlds(ONE, ONE_DEFAULT, TWO)
def test_parallel(world: World, tmp_path: Path) -> None:
    run_checks(__name__, world, tmp_path)


# -- a small transformer --------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return found


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        y: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm_2(x)))))
        return y


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.norm(x))
        return scores


def model(place: Place) -> Transformer:
    with torch.random.fork_rng(devices=[0] if place.cuda else []):
        torch.manual_seed(0)
        return Transformer().to(place.device)


def batch(place: Place, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(WORDS, (ROWS, LENGTH + 1), generator=generator).to(place.device)


def loss_of(model: Any, rows: Tensor) -> Any:
    scores = model(rows[:, :-1])
    return F.cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten())


def mine(place: Place, rows: Tensor) -> Tensor:
    return rows.chunk(place.size)[place.rank]


def adamw(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    # Some gradients are zero but for rounding: without eps, steps would be those of the rounding.
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, **settings)


def trained(
    place: Place,
    model: Any,
    share: Callable[[Place, Tensor], Tensor] = mine,
    steps: int = 4,
    **settings: Any,
) -> list[float]:
    """The losses of the whole batch in each step."""
    optimizer, losses = adamw(model.parameters(), **settings), []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, share(place, batch(place, step)))
        loss.backward()
        optimizer.step()
        losses.append(mean(place, loss) if share is mine else float(loss))
    return losses


def mean(place: Place, loss: Tensor) -> float:
    value = loss.detach().clone()
    dist.all_reduce(value, dist.ReduceOp.AVG)
    return float(value)


def whole(place: Place, rows: Tensor) -> Tensor:
    return rows


def expected(place: Place, steps: int = 4, **settings: Any) -> tuple[list[float], Transformer]:
    plain = model(place)
    return trained(place, plain, whole, steps, **settings), plain


def compare(found: Any, plain: nn.Module, tolerance: float = 1e-3) -> None:
    others = dict(plain.named_parameters())
    for name, parameter in found.named_parameters():
        close(parameter, others[name.replace("module.", "")], tolerance)


def sharded(place: Place, plain: Any = None, **options: Any) -> Any:
    plain = model(place) if plain is None else plain
    for block in plain.blocks:
        fully_shard(block, mesh=place.mesh(), **options)
    return fully_shard(plain, mesh=place.mesh(), **options)


# -- DistributedDataParallel ----------------------------------------------------------------------


@CHECKS("plain", "views", "small buckets", "static", "unused", "device_ids")
def ddp(place: Place, way: str) -> None:
    every: dict[str, dict[str, Any]] = {
        "views": {"gradient_as_bucket_view": True},
        "small buckets": {"bucket_cap_mb": 0.002},
        "static": {"static_graph": True},
        "unused": {"find_unused_parameters": True},
        "device_ids": {"device_ids": [0], "output_device": 0} if place.cuda else {},
    }
    options = every.get(way, {})
    losses, plain = expected(place)
    found = DistributedDataParallel(model(place), **options)
    for a, b in zip(trained(place, found), losses, strict=True):
        assert abs(a - b) < 1e-3, (a, b)
    compare(found, plain)
    on_device(place, *found.parameters(), *(p.grad for p in found.parameters()))


@CHECKS()
def ddp_with_bfloat16_gradients(place: Place) -> None:
    plain = model(place).bfloat16()
    losses = trained(place, copy.deepcopy(plain), whole)
    found = trained(place, DistributedDataParallel(plain), mine)
    assert all(abs(a - b) < 0.1 for a, b in zip(found, losses, strict=True)), (found, losses)


@CHECKS()
def ddp_without_sync(place: Place) -> None:
    rows, plain = batch(place, 0), model(place)
    loss_of(plain, rows).backward()
    found = DistributedDataParallel(model(place))
    parts = mine(place, rows).chunk(3)
    for number, part in enumerate(parts):
        with found.no_sync() if number < len(parts) - 1 else nullcontext():
            (loss_of(found, part) / len(parts)).backward()
    for a, b in zip(found.parameters(), plain.parameters(), strict=True):
        close(a.grad, b.grad, 1e-4)


@CHECKS("bf16", "fp16", "powersgd")
def ddp_hooks(place: Place, hook: str) -> None:
    found = DistributedDataParallel(model(place))
    if hook == "powersgd":
        state = comm_hooks.PowerSGDState(found.process_group, matrix_approximation_rank=2,
                                         start_powerSGD_iter=2)  # fmt: skip
        found.register_comm_hook(state, comm_hooks.powerSGD_hook)
    else:
        found.register_comm_hook(None, getattr(comm_hooks, f"{hook}_compress_hook"))
    losses, _ = expected(place)
    assert abs(trained(place, found)[-1] - losses[-1]) < 0.3


@CHECKS()
def ddp_with_batch_norm(place: Place) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(),
                             nn.Linear(WIDTH, 3)).to(place.device)  # fmt: skip

    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(place.device)
    plain = make()
    plain(x).square().mean().backward()
    found: Any = DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(make()))
    found(mine(place, x)).square().mean().backward()
    for a, b in zip(found.parameters(), plain.parameters(), strict=True):
        close(a.grad, b.grad, 1e-4)
    close(found.module[1].running_var, plain[1].running_var, 1e-4)
    own = DistributedDataParallel(make())
    for _ in range(2):
        own(mine(place, x)).sum().backward()
    own.report()


@CHECKS()
def zero_redundancy(place: Place) -> None:
    losses, plain = expected(place)
    found = DistributedDataParallel(model(place))
    optimizer = ZeroRedundancyOptimizer(found.parameters(), torch.optim.AdamW, lr=0.01, eps=1e-3)
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(found, mine(place, batch(place, step)))
        loss.backward()
        optimizer.step()
        assert abs(mean(place, loss) - losses[step]) < 1e-3
    compare(found, plain)


# -- fully_shard ----------------------------------------------------------------------------------


@CHECKS("plain", "kept", "fused", "foreach")
def fsdp(place: Place, way: str) -> None:
    settings: dict[str, Any] = {"fused": {"fused": True}, "foreach": {"foreach": True}}.get(way, {})
    losses, plain = expected(place, **settings)
    found = sharded(place, reshard_after_forward=False if way == "kept" else None)
    on_device(place, *found.parameters())
    for a, b in zip(trained(place, found, **settings), losses, strict=True):
        assert abs(a - b) < 1e-3, (a, b)
    compare(found, plain)
    on_device(place, *(p.grad for p in found.parameters()))


@CHECKS()
def fsdp_without_a_mesh(place: Place) -> None:
    """The mesh of all ranks is of the kind of device that the parameters are on."""
    losses, _ = expected(place, 2)
    found = fully_shard(model(place))
    on_device(place, *found.parameters())
    assert abs(trained(place, found, steps=2)[-1] - losses[-1]) < 1e-3


@CHECKS()
def fsdp_of_cpu_parameters(place: Place) -> None:
    """Parameters on the CPU go to the mesh's device, as in torch."""
    losses, _ = expected(place, 2)
    found = sharded(place, model(place).cpu())
    on_device(place, *found.parameters())
    assert abs(trained(place, found, steps=2)[-1] - losses[-1]) < 1e-3


@CHECKS("bfloat16", "float16", "reduced in float32", "output")
def fsdp_mixed_precision(place: Place, way: str) -> None:
    dtype = torch.float16 if way == "float16" else torch.bfloat16
    policy = MixedPrecisionPolicy(
        param_dtype=dtype,
        reduce_dtype=torch.float32 if way == "reduced in float32" else None,
        output_dtype=torch.float32 if way == "output" else None,
    )
    losses, _ = expected(place)
    if way == "output":  # of the whole alone, as the model's own norm takes what blocks give
        found = fully_shard(model(place), mesh=place.mesh(), mp_policy=policy)
    else:
        found = sharded(place, mp_policy=policy)
    for a, b in zip(trained(place, found), losses, strict=True):
        assert abs(a - b) < 0.1, (a, b)
    assert all(p.dtype is torch.float32 for p in found.parameters())


@CHECKS()
def fsdp_accumulation_and_clipping(place: Place) -> None:
    plain, found = model(place), sharded(place)
    rows = batch(place, 0)
    loss_of(plain, rows).backward()
    expected_norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    parts = mine(place, rows).chunk(3)
    for number, part in enumerate(parts):
        found.set_requires_gradient_sync(number == len(parts) - 1)
        (loss_of(found, part) / len(parts)).backward()
    norm: Any = nn.utils.clip_grad_norm_(found.parameters(), 0.1)
    on_device(place, norm)
    close(norm, expected_norm, 1e-4)
    for a, b in zip(found.parameters(), plain.parameters(), strict=True):
        close(a.grad, b.grad, 1e-4)
    close(clip_grad_norm_(found.parameters(), 0.1), torch.tensor(0.1), 1e-3)


@CHECKS()
def fsdp_with_offload(place: Place) -> None:
    """Works, or is refused by name before anything has changed."""
    if not lacking("CPUOffloadPolicy", lambda: sharded(place, offload_policy=CPUOffloadPolicy())):
        trained(place, sharded(place, offload_policy=CPUOffloadPolicy()), steps=2)


@CHECKS()
def fsdp_of_a_meta_model(place: Place) -> None:
    with torch.device("meta"):
        found: Any = Transformer()
    sharded(place, found)
    found.to_empty(device=place.device)
    on_device(place, *found.parameters())
    torch.manual_seed(0)
    for module in found.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    losses = trained(place, found)
    assert losses[-1] == losses[-1]


@CHECKS("fsdp", "ddp")
def activation_checkpointing(place: Place, way: str) -> None:
    losses, _ = expected(place)
    found: Any = model(place)
    for number, block in enumerate(found.blocks):
        found.blocks[number] = checkpoint_wrapper(block)
    found = sharded(place, found) if way == "fsdp" else DistributedDataParallel(found)
    for a, b in zip(trained(place, found), losses, strict=True):
        assert abs(a - b) < 1e-3, (a, b)


@CHECKS("fsdp", "ddp")
def torchs_activation_checkpointing_with_dropout(place: Place, way: str) -> None:
    """The masks of the second forward pass are those of the first: the loss goes down."""
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    layer = Block(dropout=0.5).to(place.device)
    wrapped: Any = fully_shard(layer) if way == "fsdp" else DistributedDataParallel(layer)
    x = torch.randn(3, LENGTH, WIDTH, device=place.device, requires_grad=True)
    torch.manual_seed(7)
    checkpoint(wrapped, x, use_reentrant=False).square().sum().backward()
    first = x.grad
    x.grad = None
    torch.manual_seed(7)
    wrapped(x).square().sum().backward()
    close(x.grad, first, 1e-4)


@CHECKS("fsdp", "ddp", "plan")
def autocast_and_scaler(place: Place, way: str) -> None:
    losses, _ = expected(place)
    found: Any = model(place)
    if way == "plan":
        found = parallelize_module(found, place.mesh(), plan())
    else:
        found = sharded(place, found) if way == "fsdp" else DistributedDataParallel(found)
    optimizer = adamw(found.parameters())
    scaler = torch.amp.GradScaler(place.kind, init_scale=1024.0)
    share = whole if way == "plan" else mine
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast(place.kind, torch.float16 if place.cuda else torch.bfloat16):
            loss = loss_of(found, share(place, batch(place, step)))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(found.parameters(), 1e6)
        scaler.step(optimizer)
        scaler.update()
        assert abs(mean(place, loss) - losses[step]) < 0.1
    assert scaler.get_scale() == 1024.0


@CHECKS("eager", "aot_eager", seconds=120.0)
def compiled(place: Place, backend: str) -> None:
    losses, _ = expected(place)
    found = torch.compile(sharded(place), backend=backend)
    for a, b in zip(trained(place, found), losses, strict=True):
        assert abs(a - b) < 1e-3, (a, b)


# -- tensor parallelism ---------------------------------------------------------------------------


def plan(sequence: bool = False) -> dict[str, Any]:
    if not sequence:
        return {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "blocks.*.attention.[qkv]": ColwiseParallel(),
            "blocks.*.attention.out": RowwiseParallel(),
            "blocks.*.up": ColwiseParallel(),
            "blocks.*.down": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
    between = Shard(1)
    return {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "blocks.*.norm_?": SequenceParallel(),
        "blocks.*.attention": PrepareModuleInput(
            input_layouts=between, desired_input_layouts=Replicate()
        ),
        "blocks.*.attention.[qkv]": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(output_layouts=between),
        "blocks.*.up": ColwiseParallel(input_layouts=between),
        "blocks.*.down": RowwiseParallel(output_layouts=between),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }


@CHECKS("features", "sequence")
def tensor_parallel(place: Place, way: str) -> None:
    losses, plain = expected(place)
    found = parallelize_module(model(place), place.mesh(), plan(way == "sequence"))
    for a, b in zip(trained(place, found, whole), losses, strict=True):
        assert abs(a - b) < 1e-3, (a, b)
    compare(found, plain)


@CHECKS()
def tensor_parallel_loss(place: Place) -> None:
    losses, _ = expected(place, 1)
    styles = plan()
    styles["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    found = parallelize_module(model(place), place.mesh(), styles)
    with loss_parallel():
        loss = loss_of(found, batch(place, 0))
        loss.backward()
    assert abs(float(loss) - losses[0]) < 1e-3


@CHECKS()
def two_axes(place: Place) -> None:
    """fully_shard along one axis, tensor parallelism along the other."""
    losses, plain = expected(place)
    mesh = place.mesh(1, place.size, names=("dp", "tp"))
    found: Any = parallelize_module(model(place), mesh["tp"], plan())
    for block in found.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(found, mesh=mesh["dp"])
    for a, b in zip(trained(place, found, whole), losses, strict=True):
        assert abs(a - b) < 1e-3, (a, b)
    compare(found, plain)


@CHECKS()
def replicas_of_shards(place: Place) -> None:
    losses, _ = expected(place)
    mesh = place.mesh(place.size, 1, names=("replicas", "shards"))
    found = fully_shard(model(place), mesh=mesh)
    for a, b in zip(trained(place, found), losses, strict=True):
        assert abs(a - b) < 1e-3, (a, b)


@CHECKS()
def batches_as_dtensors(place: Place) -> None:
    losses, _ = expected(place)
    found = parallelize_module(model(place), place.mesh(), plan())

    def share(place: Place, rows: Tensor) -> Tensor:
        return distribute_tensor(rows, place.mesh(), [Replicate()])

    for a, b in zip(trained(place, found, share), losses, strict=True):
        assert abs(a - b) < 1e-3, (a, b)


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
    found: Any = model(place)
    if way in ("plan", "dtensor"):
        found = parallelize_module(found, place.mesh(), plan())
    else:
        found = sharded(place, found) if way == "fsdp" else DistributedDataParallel(found)
    optimizer = adamw(found.parameters())

    def step(number: int) -> None:
        optimizer.zero_grad()
        rows = batch(place, number)
        if way == "dtensor":
            rows = distribute_tensor(rows, place.mesh(), [Replicate()])
        loss_of(found, rows).backward()
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
    assert isinstance(sharded(place).head.weight, DTensor)


@CHECKS()
def inputs_on_the_cpu(place: Place) -> None:
    """torch moves inputs to the device where device_ids are given."""
    if not place.cuda:
        return
    found = DistributedDataParallel(nn.Linear(3, 3).cuda(), device_ids=[0])
    y = found(torch.ones(2, 3))
    on_device(place, y)
    same(y, found.module(torch.ones(2, 3).cuda()))
