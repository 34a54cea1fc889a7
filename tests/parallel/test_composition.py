"""Each way of data parallelism with each thing that goes beside it, against the plain model.

The table of docs/how-to/data-parallel.md, cell by cell: the same losses and parameters as one
process has on the whole batch, or an error that says why not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tilework.distributed as dist
from tests.rounding import assert_close
from tilework.dtensor import DTensor, init_device_mesh
from tilework.parallel import (
    ColwiseParallel,
    DistributedDataParallel,
    RowwiseParallel,
    SyncBatchNorm,
    ZeroRedundancyOptimizer,
    clip_grad_norm_,
    comm_hooks,
    fully_shard,
    parallelize_module,
)
from tilework.sharded import ChunkShardingSpec, shard_parameter
from tilework.testing import run_ranks

WIDTH, ROWS, STEPS = 8, 4, 2


class Block(nn.Module):
    """Two layers, which may be computed again in backward."""

    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.recompute = recompute

    def compute(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return y

    def forward(self, x: Tensor) -> Tensor:
        if not self.recompute:
            return self.compute(x)
        y: Tensor = checkpoint(self.compute, x, use_reentrant=self.recompute == "reentrant")
        return y


class Net(nn.Module):
    """Two blocks, and perhaps a batch normalisation."""

    def __init__(self, norm: bool = False, recompute: str = "") -> None:
        super().__init__()
        self.first, self.second = Block(recompute), Block(recompute)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x + self.second(self.first(x)))
        return y


def made(**options: Any) -> Any:
    model = Net(**options)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.5, 0.5, generator=generator)
    return model


@dataclass
class Way:
    """A way of data parallelism: on how many ranks, and what it makes of a model."""

    wrap: Callable[[Any], tuple[Any, Any]]
    ranks: int = 2
    shards: bool = False


def ddp(**options: Any) -> Callable[[Any], tuple[Any, Any]]:
    def wrap(model: Any) -> tuple[Any, Any]:
        group = dist.get_default_group()
        return DistributedDataParallel(model, bucket_cap_mb=0.0005, **options), group

    return wrap


def sharded(shape: tuple[int, ...] = (), **options: Any) -> Callable[[Any], tuple[Any, Any]]:
    def wrap(model: Any) -> tuple[Any, Any]:
        mesh = init_device_mesh("cpu", shape) if shape else None
        for each in (model.first, model.second, model):
            fully_shard(each, mesh=mesh, **options)
        return model, dist.get_default_group()

    return wrap


def with_tensor_parallelism(shards: bool) -> Callable[[Any], tuple[Any, Any]]:
    def wrap(model: Any) -> tuple[Any, Any]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for block in (model.first, model.second):
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tp"], plan)
        group = mesh["dp"].get_group(0)
        for layer in model.modules():
            if isinstance(layer, SyncBatchNorm):
                layer.process_group = group
        if not shards:
            return DistributedDataParallel(model, device_mesh=mesh["dp"]), group
        for each in (model.first, model.second, model):
            fully_shard(each, mesh=mesh["dp"])
        return model, group

    return wrap


WAYS = {
    "ddp": Way(ddp()),
    "ddp-views": Way(ddp(gradient_as_bucket_view=True)),
    "ddp-static": Way(ddp(static_graph=True)),
    "ddp-unused": Way(ddp(find_unused_parameters=True)),
    "fully_shard": Way(sharded(), shards=True),
    "fully_shard-kept": Way(sharded(reshard_after_forward=False), 3, shards=True),
    "fully_shard-replicas": Way(sharded((2, 2)), 4, shards=True),
    "ddp-tp": Way(with_tensor_parallelism(False), 4),
    "fully_shard-tp": Way(with_tensor_parallelism(True), 4, shards=True),
}


@contextmanager
def without_sync(model: Any) -> Iterator[None]:
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
        return
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)
        return
    yield


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@dataclass(eq=False)
class Beside:
    """A thing that goes beside: the model's options, and what it adds to a step."""

    options: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any], Any] = lambda model: model
    after: Callable[[Any], Any] = lambda model: model
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    optimizer: Callable[[Any, Any], Any] = lambda parameters, group: sgd(parameters)
    scaled: bool = False
    parts: int = 1
    clip: float = 0.0
    tolerance: float = 1e-4


def train(model: Any, beside: Beside, optimizer: Any, share: Callable[[Tensor], Tensor]) -> Any:
    """The loss of each step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=beside.scaled)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for part in range(beside.parts):
            generator = torch.Generator().manual_seed(10 * step + part)
            x = torch.randn(12, WIDTH, generator=generator, requires_grad=True)
            last = part == beside.parts - 1
            with nullcontext() if last else without_sync(model):
                with beside.around():
                    loss = (model(share(x)).float() - share(x.detach()).roll(1, 1)).square().mean()
                scaler.scale(loss / beside.parts).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        if beside.clip:
            meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in model.parameters()}
            clip: Any = torch.nn.utils.clip_grad_norm_ if len(meshes) == 1 else clip_grad_norm_
            clip(model.parameters(), beside.clip)
        scaler.step(optimizer)
        scaler.update()
        losses.append(total)
    return losses


def full(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


@cache
def trained(beside: Beside) -> tuple[Any, Any]:
    """The plain model, trained on all rows, and its losses."""
    plain = made(**beside.options)
    return plain, train(plain, beside, sgd(plain.parameters()), lambda x: x)


def compare(way: Way, beside: Beside, **options: Any) -> None:
    """Train the parallel model on each rank's rows; compare with the plain one on all rows."""
    plain, wanted = trained(beside)

    def program(rank: int) -> None:
        model, group = way.wrap(beside.prepare(made(**beside.options)))
        model = beside.after(model)

        def share(x: Tensor) -> Tensor:
            mine: Tensor = x.chunk(group.size())[group.rank()]
            return mine

        optimizer = beside.optimizer(model.parameters(), group)
        losses = torch.tensor(train(model, beside, optimizer, share))
        dist.all_reduce(losses, dist.ReduceOp.AVG, group)
        tolerance: Any = {"rtol": beside.tolerance, "atol": beside.tolerance}
        assert_close(losses, torch.tensor(wanted), **tolerance)
        if beside.tolerance < 1e-3:
            own = model.module if isinstance(model, DistributedDataParallel) else model
            for mine, other in zip(own.parameters(), plain.parameters(), strict=True):
                assert_close(full(mine), other.detach(), rtol=1e-3, atol=1e-4)

    run_ranks(way.ranks, program, **options)


BESIDE = {
    "nothing": Beside(),
    "sync_batch_norm": Beside({"norm": True}, SyncBatchNorm.convert_sync_batchnorm),
    "checkpointing": Beside({"recompute": "plain"}),
    "reentrant checkpointing": Beside({"recompute": "reentrant"}),
    "autocast": Beside(around=lambda: torch.autocast("cpu", torch.bfloat16), tolerance=2e-2),
    "gradient scaling": Beside(scaled=True),
    "accumulation": Beside(parts=3),
    "clipping": Beside(clip=0.1),
    "all of them": Beside(
        {"norm": True, "recompute": "plain"},
        SyncBatchNorm.convert_sync_batchnorm,
        scaled=True,
        clip=0.1,
    ),
}


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("way", WAYS)
def test_the_plain_models_losses(way: str, beside: str) -> None:
    if (way, beside) == ("ddp-unused", "reentrant checkpointing"):
        with pytest.raises(RuntimeError, match="to mark a variable ready only once"):
            compare(WAYS[way], BESIDE[beside])
        return
    compare(WAYS[way], BESIDE[beside])


REPLICAS = [name for name, way in WAYS.items() if not way.shards]


def reduced_within(model: Any) -> Any:
    """A hook for the group of the model's replicas."""
    model.register_comm_hook(model.process_group, comm_hooks.allreduce_hook)
    return model


@pytest.mark.parametrize("way", REPLICAS)
def test_communication_hooks(way: str) -> None:
    compare(WAYS[way], Beside(after=reduced_within))


@pytest.mark.parametrize("way", REPLICAS)
def test_optimizer_states_spread_over_replicas(way: str) -> None:
    def spread(parameters: Any, group: Any) -> Any:
        settings: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}
        return ZeroRedundancyOptimizer(parameters, torch.optim.SGD, group, **settings)

    compare(WAYS[way], Beside(optimizer=spread))
    compare(WAYS[way], Beside(optimizer=spread, clip=0.1, scaled=True))


def test_scaled_gradients_that_overflow_are_left_out_on_all_ranks() -> None:
    def program(rank: int, way: Way) -> list[float]:
        model, _ = way.wrap(made())
        before = [full(p.data).clone() for p in model.parameters()]
        optimizer = sgd(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        x = torch.full((1, WIDTH), float("inf") if rank == 0 else 1.0)
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        for own, wanted in zip(model.parameters(), before, strict=True):
            assert torch.equal(full(own.data), wanted)
        return [scaler.get_scale()]

    for name in ("ddp", "fully_shard"):
        assert run_ranks(2, lambda rank, way=WAYS[name]: program(rank, way)) == [[2.0]] * 2


def inner_compiled(model: Any) -> Any:
    model.first.compile(backend="aot_eager")
    model.second.compile(backend="aot_eager")
    return model


@pytest.mark.usefixtures("compilers")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("where", ["inside", "outside"])
@pytest.mark.parametrize("way", ["ddp", "fully_shard"])
def test_compiled(way: str, where: str) -> None:
    beside = (
        Beside(prepare=inner_compiled)
        if where == "inside"
        else Beside(after=lambda model: torch.compile(model, backend="aot_eager"))
    )
    compare(WAYS[way], beside, kind="processes")


# -- what does not go together says why --------------------------------------------------------


def refused(build: Callable[[], Any], message: str, error: type[Exception] = ValueError) -> None:
    def program(rank: int) -> None:
        with pytest.raises(error, match=message):
            build()

    run_ranks(2, program)


def test_replicas_of_what_is_sharded_over_the_same_ranks() -> None:
    def of_shards() -> Any:
        return DistributedDataParallel(sharded()(made())[0])

    def of_tensor_parallelism() -> Any:
        model = made()
        mesh = init_device_mesh("cpu", (2,))
        parallelize_module(model.first, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return DistributedDataParallel(model)

    def of_sharded_tensors() -> Any:
        model = made()
        shard_parameter(
            model.first.up, "weight", ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        )
        return DistributedDataParallel(model)

    for build in (of_shards, of_tensor_parallelism, of_sharded_tensors):
        refused(build, "lies on ranks of the group that averages gradients")


def test_shards_of_replicas() -> None:
    refused(lambda: fully_shard(ddp()(made())[0]), "is a DistributedDataParallel")


def test_shards_have_no_hooks_and_no_join() -> None:
    def model() -> Any:
        return sharded()(made())[0]

    refused(lambda: model().register_comm_hook(None, None), "reduce-scattered", NotImplementedError)
    refused(lambda: model().join(), "gather", NotImplementedError)
    refused(lambda: model().no_sync(), "set_requires_gradient_sync", NotImplementedError)


def test_shards_need_no_states_spread_over_ranks() -> None:
    def build() -> Any:
        model = sharded()(made())[0]
        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)

    refused(build, "sharded over ranks of the group already")


def test_steps_within_backward_of_sharded_parameters() -> None:
    def program(rank: int) -> None:
        model, group = WAYS["ddp-tp"].wrap(made())
        with pytest.raises(ValueError, match="overlap_with_ddp=True takes plain parameters"):
            ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.SGD, group, overlap_with_ddp=True, lr=0.1
            )

    run_ranks(4, program)


def test_sharded_tensors_beside_replicas() -> None:
    """Two ranks hold a weight together, two others its replica, averaged shard by shard."""

    class Local(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            weight: Any = self.weight
            y: Tensor = (weight.local_tiles()[0] * x).sum()
            return y

    def program(rank: int) -> None:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        first = rank // 2 * 2
        spec = ChunkShardingSpec(0, [f"rank:{first}/cpu", f"rank:{first + 1}/cpu"])
        module: Any = Local(2, 4, bias=False)
        group: Any = pairs[rank // 2]
        shard_parameter(module, "weight", spec, src_rank=first, process_group=group)
        model: Any = DistributedDataParallel(module, process_group=across[rank % 2])
        model(torch.tensor(1.0 + rank // 2)).backward()
        (tile,) = module.weight.local_tiles()
        assert tile.grad.tolist() == [[1.5, 1.5]] * 2

    run_ranks(4, program)
