"""The same model, trained by torch's own parallelisms on Gloo and on tilework: the same losses."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch._C._distributed_c10d as c10d
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.jobs import Launcher, Rank

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, of what it uses itself
    from torch.distributed.optim import ZeroRedundancyOptimizer

STEPS = 4


class Net(nn.Module):
    """Two layers that every step uses, and one that only some do."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up = nn.Linear(8, width)
        self.down = nn.Linear(width, 8)
        self.sometimes = nn.Linear(8, 8)

    def forward(self, x: Tensor, also: bool = False) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x)))
        return y + self.sometimes(x) if also else y


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * rank + step))


def train(
    model: nn.Module, rank: int, optimizer: torch.optim.Optimizer | None = None, **forward: Any
) -> list[float]:
    """Losses of a few steps."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        x = batch(rank, step)
        loss = (model(x, **forward) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def plain(ranks: int, **forward: Any) -> list[float]:
    """The losses of one process that sees the batches of all ranks."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        x = torch.cat([batch(rank, step) for rank in range(ranks)])
        loss = (model(x, **forward) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def same_on_both(found: list[dict[str, list[float]]]) -> list[float]:
    """The mean over ranks of the losses, which were the same on Gloo and on tilework."""
    for by_backend in found:
        assert by_backend["tilework"] == by_backend["gloo"]
    every = [by_backend["tilework"] for by_backend in found]
    return [sum(losses) / len(losses) for losses in zip(*every, strict=True)]


# -- DDP -----------------------------------------------------------------------------------


def ddp_plain(rank: Rank) -> list[float]:
    return train(DDP(Net(), find_unused_parameters=True), rank.number)


def ddp_all_used(rank: Rank) -> list[float]:
    return train(DDP(Net(), bucket_cap_mb=0.0005), rank.number, also=True)


def ddp_static(rank: Rank) -> list[float]:
    model = DDP(Net(), static_graph=True, gradient_as_bucket_view=True)
    return train(model, rank.number)


def ddp_no_sync(rank: Rank) -> list[float]:
    model = DDP(Net(), find_unused_parameters=True)
    with model.no_sync():
        model(batch(rank.number, 50)).square().mean().backward()
    return train(model, rank.number)


def ddp_fp16_hook(rank: Rank) -> list[float]:
    model = DDP(Net())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train(model, rank.number, also=True)


def ddp_builtin_hook(rank: Rank) -> list[float]:
    model = DDP(Net())
    c10d._register_builtin_comm_hook(model.reducer, c10d.BuiltinCommHookType.ALLREDUCE)
    return train(model, rank.number, also=True)


#: Groups that a hook's closures hold, too: torch's Gloo ends the process where the last reference
#: to one of its groups goes on the group's own thread.
_KEPT: list[Any] = []


def ddp_power_sgd(rank: Rank) -> list[float]:
    _KEPT.append(torch.distributed.group.WORLD)
    model = DDP(Net())
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(model, rank.number, also=True)


def ddp_compiled(rank: Rank) -> list[float]:
    model: Any = torch.compile(DDP(Net()), backend="aot_eager")
    return train(model, rank.number, also=True)


def zero_optimizer(rank: Rank) -> list[float]:
    model = DDP(Net())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01
    )
    return train(model, rank.number, optimizer, also=True)


@pytest.mark.parametrize("program", [ddp_plain, ddp_static])
def test_ddp_with_unused_parameters(ranks: Launcher, program: Any) -> None:
    mean = same_on_both(ranks(2, Rank.on_both, program))
    assert mean == pytest.approx(plain(2), rel=1e-5)


@pytest.mark.parametrize("program", [ddp_all_used, ddp_builtin_hook, ddp_compiled])
def test_ddp(ranks: Launcher, program: Any) -> None:
    mean = same_on_both(ranks(2, Rank.on_both, program))
    assert mean == pytest.approx(plain(2, also=True), rel=1e-5)


@pytest.mark.parametrize("program", [ddp_no_sync, ddp_fp16_hook, ddp_power_sgd, zero_optimizer])
def test_what_changes_the_gradients_of_ddp(ranks: Launcher, program: Any) -> None:
    mean = same_on_both(ranks(2, Rank.on_both, program))
    assert len(set(mean)) == STEPS


def sparse_embedding(rank: Rank) -> list[float]:
    model = DDP(nn.Embedding(10, 4, sparse=True))
    model(torch.tensor([rank.number, 2, 2])).sum().backward()
    gradient = model.module.weight.grad
    assert isinstance(gradient, Tensor)
    assert gradient.is_sparse
    found: list[float] = gradient.to_dense()[:, 0].tolist()
    return found


def test_gradients_of_sparse_embeddings(ranks: Launcher) -> None:
    for by_backend in ranks(2, Rank.on_both, sparse_embedding):
        assert by_backend["tilework"] == by_backend["gloo"] == [0.5, 0.5, 2.0] + [0.0] * 7


def uneven_inputs(rank: Rank) -> list[float]:
    model = DDP(Net())
    losses = []
    with Join([model]):
        for step in range(2 + rank.number):
            loss = model(batch(rank.number, step), also=True).square().mean()
            loss.backward()
            losses.append(loss.item())
    assert model.module.up.weight.grad is not None
    return [*losses, float(model.module.up.weight.grad.sum())]


def test_join_with_uneven_inputs(ranks: Launcher) -> None:
    for by_backend in ranks(2, Rank.on_both, uneven_inputs):
        assert by_backend["tilework"] == by_backend["gloo"]


# -- FSDP, tensor parallelism --------------------------------------------------------------


def fsdp(rank: Rank) -> list[float]:
    model = Net()
    for layer in (model.up, model.down, model.sometimes):
        fully_shard(layer)
    fully_shard(model)
    return train(model, rank.number, also=True)


def fsdp_in_shared_memory(rank: Rank) -> list[float]:
    model: Any = Net()
    fully_shard(model)
    model.set_allocate_memory_from_process_group_for_comm(True)  # Gloo has none, and is as before
    return train(model, rank.number, also=True)


def fsdp_bfloat16(rank: Rank) -> list[float]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = Net()
    fully_shard(model, mp_policy=policy)
    return train(model, rank.number, also=True)


def tensor_parallel(rank: Rank) -> list[float]:
    mesh = init_device_mesh("cpu", (rank.size,))
    model = Net()
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return train(model, 0, also=True)  # all ranks see the same batches


def fsdp_and_tensor_parallel(rank: Rank) -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = Net()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"])
    return train(model, mesh["data"].get_local_rank(), also=False)


@pytest.mark.parametrize("program", [fsdp, fsdp_in_shared_memory])
def test_fsdp(ranks: Launcher, program: Any) -> None:
    mean = same_on_both(ranks(2, Rank.on_both, program))
    assert mean == pytest.approx(plain(2, also=True), rel=1e-5)


def test_fsdp_in_bfloat16(ranks: Launcher) -> None:
    mean = same_on_both(ranks(2, Rank.on_both, fsdp_bfloat16))
    assert mean == pytest.approx(plain(2, also=True), rel=0.05)


def test_tensor_parallel(ranks: Launcher) -> None:
    mean = same_on_both(ranks(2, Rank.on_both, tensor_parallel))
    assert mean == pytest.approx(plain(1, also=True), rel=1e-5)


def test_two_dimensions(ranks: Launcher) -> None:
    mean = same_on_both(ranks(4, Rank.on_both, fsdp_and_tensor_parallel))
    assert mean == pytest.approx(plain(2), rel=1e-5)
