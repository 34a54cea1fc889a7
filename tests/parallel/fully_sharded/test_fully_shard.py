"""Fully sharded modules train as plain ones, and hold what they promise."""

from __future__ import annotations

import copy
import io
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import tilework.distributed as dist
from tests.rounding import assert_close
from tilework.dtensor import DTensor, Shard, init_device_mesh
from tilework.errors import CollectiveMismatchError
from tilework.parallel import (
    ColwiseParallel,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    RowwiseParallel,
    SyncBatchNorm,
    fully_shard,
    parallelize_module,
    register_fsdp_forward_method,
)
from tilework.parallel.fully_sharded import unit
from tilework.parallel.fully_sharded.unit import GatheredParameters
from tilework.testing import run_ranks

mse: Any = F.mse_loss


class Block(nn.Module):
    """A residual block; may be recomputed in backward."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.recompute: bool | None = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


class Net(nn.Module):
    """Blocks between two layers, of sizes that two and three ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.blocks = nn.ModuleList(Block(10, 7) for _ in range(3))
        self.last = nn.Linear(10, 5)

    def forward(self, x: Tensor, reentrant: bool | None = None) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
        y: Tensor = self.last(x)
        return y


def seeded() -> Any:
    module = Net()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.uniform_(-0.5, 0.5, generator=generator)
    return module


def rows(ranks: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randn(2 * ranks, 6, generator=generator),
        torch.randn(2 * ranks, 5, generator=generator),
    )


def shard_all(model: Any, **settings: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


def full(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole


def compare(
    rank: int,
    ranks: int,
    model: Any,
    plain: Any,
    *,
    steps: int = 3,
    tolerance: float = 1e-4,
    **call: Any,
) -> None:
    """Train both for some steps; gradients, norms and parameters must be equal."""
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, plain)]
    sharded = list(model.named_parameters())  # as the optimizer has them
    own = slice(2 * rank, 2 * rank + 2)
    for step in range(steps):
        x, y = rows(ranks, step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        mse(model(x[own], **call).float(), y[own]).backward()
        mse(plain(x), y).backward()
        for (name, mine), wanted in zip(sharded, plain.parameters(), strict=True):
            if wanted.grad is None:
                assert mine.grad is None, name
            else:
                assert_close(full(mine.grad), wanted.grad, rtol=tolerance, atol=tolerance)
        for optimizer in optimizers:
            optimizer.step()
    for (_, mine), wanted in zip(sharded, plain.parameters(), strict=True):
        assert_close(full(mine), wanted.detach(), rtol=0.01, atol=10 * tolerance)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("reshard", [None, True, False])
def test_training(ranks: int, reshard: bool | None) -> None:
    def program(rank: int) -> None:
        model = shard_all(seeded(), reshard_after_forward=reshard)
        assert isinstance(model, FSDPModule)
        assert type(model).__name__ == "FSDPNet"
        compare(rank, ranks, model, seeded())

    run_ranks(ranks, program)


def test_what_is_kept_after_forward_can_be_changed() -> None:
    def program(rank: int) -> None:
        model = shard_all(seeded())
        for keeps in (True, False):
            model.set_reshard_after_forward(not keeps)
            model(rows(2, rank)[0])
            assert (model.blocks[0]._fsdp_state.phase == "gathered") == keeps
            assert isinstance(model.blocks[0].up.weight, DTensor)  # full within forward alone

    run_ranks(2, program)


def test_between_processes() -> None:
    def program(rank: int) -> None:
        compare(rank, 2, shard_all(seeded()), seeded())

    run_ranks(2, program, kind="processes")


def test_shards_over_hosts_and_replicas() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = shard_all(seeded(), mesh=mesh)
        assert str(model.first.weight.data) == (
            "DTensor f32[10@shard, 6] on cpu mesh replicate=2 shard=2"
        )
        compare(rank, 4, model, seeded())

    run_ranks(4, program)


@pytest.mark.parametrize("local", [True, False])
def test_beside_tensor_parallelism(local: bool) -> None:
    """With plain tensors between the layers, and with DTensors."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = seeded()
        for block in model.blocks:
            plan = {
                "up": ColwiseParallel(use_local_output=local),
                "down": RowwiseParallel(use_local_output=local),
            }
            parallelize_module(block, mesh["tp"], plan)
        shard_all(model, mesh=mesh["dp"])
        weight = model.blocks[0].up.weight
        assert weight.device_mesh == mesh
        plain = seeded()
        own = slice(2 * (rank // 2), 2 * (rank // 2) + 2)
        for step in range(2):
            x, y = rows(2, step)
            model.zero_grad()
            plain.zero_grad()
            mse(model(x[own]), y[own]).backward()
            mse(plain(x), y).backward()
            for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
                assert_close(full(mine.grad), wanted.grad, rtol=1e-4, atol=1e-5)

    run_ranks(4, program)


@pytest.mark.parametrize(
    ("names", "axes"),
    [
        (("pp", "dp", "tp"), ("dp",)),  # one stage of a pipeline
        (("dp", "cp", "tp"), ("dp", "cp")),  # shards over hosts, and replicas
        (("dp", "cp", "tp"), "dp_cp"),  # flattened
    ],
)
def test_parts_of_a_mesh_of_three_axes(names: tuple[str, ...], axes: Any) -> None:
    x = torch.randn(4, 4)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
        shards = mesh["dp", "cp"].flatten(axes) if axes == "dp_cp" else mesh[axes]
        torch.manual_seed(0)
        plain: Any = nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, 4))
        model = copy.deepcopy(plain)
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=shards)
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, plain)]
        number = shards.spec.ranks.index(rank)
        for _ in range(2):
            model(x.chunk(shards.size())[number]).square().mean().backward()
            plain(x).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(full(mine), wanted.detach(), rtol=1e-4, atol=1e-5)

    run_ranks(8, program)


def test_any_dim() -> None:
    def program(rank: int) -> None:
        def last_dim(parameter: nn.Parameter) -> Shard:
            return Shard(parameter.ndim - 1)

        model = shard_all(seeded(), shard_placement_fn=last_dim)
        assert model.first.weight.placements == (Shard(1),)
        compare(rank, 2, model, seeded())

    run_ranks(2, program)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_blocks(reentrant: bool) -> None:
    def program(rank: int) -> None:
        compare(rank, 2, shard_all(seeded()), seeded(), reentrant=reentrant)

    run_ranks(2, program)


def test_what_was_gathered_before_an_optimizer_step_is_not_used_after_it() -> None:
    def program(rank: int) -> None:
        model = shard_all(seeded(), reshard_after_forward=False)
        model.set_reshard_after_backward(False)
        compare(rank, 2, model, seeded())
        model.blocks[0].reshard()
        model.blocks[0].unshard(async_op=True)
        with torch.no_grad():
            for parameter in model.blocks[0].parameters():
                parameter.zero_()
        model.blocks[0].reshard()
        model.blocks[0].unshard()
        assert not any(p.any() for p in model.blocks[0].parameters())

    run_ranks(2, program)


def test_gradients_accumulate() -> None:
    def program(rank: int) -> None:
        model, plain = shard_all(seeded()), seeded()
        own = slice(2 * rank, 2 * rank + 2)
        for step in range(3):
            x, y = rows(2, step)
            model.set_requires_gradient_sync(step == 2)
            mse(model(x[own]), y[own]).backward()
            mse(plain(x), y).backward()
        for step in range(2):  # and with a reduction in each
            x, y = rows(2, step)
            mse(model(x[own]), y[own]).backward()
            mse(plain(x), y).backward()
        for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(full(mine.grad), wanted.grad, rtol=1e-4, atol=1e-5)

    run_ranks(2, program)


def test_frozen_and_ignored_parameters() -> None:
    def program(rank: int) -> None:
        model, plain = seeded(), seeded()
        for each in (model, plain):
            each.blocks[0].requires_grad_(False)
            each.first.requires_grad_(False)
        ignored = list(model.last.parameters())
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model, ignored_params=ignored)
        assert not isinstance(model.last.weight, DTensor)
        own = slice(2 * rank, 2 * rank + 2)
        x, y = rows(2, 0)
        mse(model(x[own]), y[own]).backward()
        mse(plain(x), y).backward()
        assert model.blocks[0].up.weight.grad is None
        assert_close(full(model.blocks[1].up.weight.grad), plain.blocks[1].up.weight.grad)

    run_ranks(2, program)


def _clamped(parameter: Any) -> None:
    parameter.grad.clamp_(-1e-3, 1e-3)


#: What is done to a parameter after it was wrapped.
LATER: dict[str, Callable[[Any], Any]] = {
    "frozen": lambda p: p.requires_grad_(False),
    "frozen and thawed": lambda p: p.requires_grad_(False).requires_grad_(),
    "a hook": lambda p: p.register_hook(lambda grad: grad * 2),
    "a hook that looks": lambda p: p.register_hook(lambda grad: None),
    "a hook after the gradient": lambda p: p.register_post_accumulate_grad_hook(_clamped),
}


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("what", LATER)
def test_parameters_that_are_frozen_or_hooked_later(what: str, at: int) -> None:
    def program(rank: int) -> None:
        model, plain = seeded(), seeded()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
        own = slice(2 * rank, 2 * rank + 2)
        for step in range(3):
            if step == at:
                LATER[what](model.blocks[0].up.weight)
                LATER[what](plain.blocks[0].up.weight)
            x, y = rows(2, step)
            for optimizer in optimizers:
                optimizer.zero_grad()
            mse(model(x[own]), y[own]).backward()
            mse(plain(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
        for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            assert (mine.grad is None) == (wanted.grad is None)
            assert_close(full(mine), wanted.detach(), rtol=1e-4, atol=1e-6)

    run_ranks(2, program)


class Tied(nn.Module):
    """A table that is also the last layer's weight, and a layer that some steps do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.middle, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last = nn.Linear(4, 9, bias=False)
        self.last.weight = self.table.weight

    def forward(self, ids: Tensor, other: bool = False) -> Tensor:
        x = self.table(ids)
        y: Tensor = self.last(self.other(x) if other else self.middle(x))
        return y


def test_shared_weights_and_unused_layers() -> None:
    def program(rank: int) -> None:
        torch.manual_seed(0)
        plain: Any = Tied()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.uniform_(generator=generator)
        model = copy.deepcopy(plain)
        for layer in (model.middle, model.other):
            fully_shard(layer)
        fully_shard(model)
        assert model.last.weight is model.table.weight
        for step in range(3):
            ids = torch.tensor([[1, 2], [3, 2 + step]])
            model.zero_grad()
            plain.zero_grad()
            model(ids[rank], step % 2 == 1).square().mean().backward()
            plain(ids, step % 2 == 1).square().mean().backward()
            for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
                if wanted.grad is None:
                    assert mine.grad is None
                else:
                    assert_close(full(mine.grad), wanted.grad)

    run_ranks(2, program)


def test_a_penalty_on_parameters() -> None:
    def loss(model: Any, x: Tensor, y: Tensor, plain: bool) -> Any:
        penalty: Any = sum(parameter.square().sum() for parameter in model.parameters())
        return mse(model(x), y) + 0.1 * (penalty if plain else penalty.full_tensor())

    def program(rank: int) -> None:
        model, plain = fully_shard(seeded()), seeded()
        x, y = rows(2, 0)
        own = slice(2 * rank, 2 * rank + 2)
        loss(model, x[own], y[own], plain=False).backward()
        loss(plain, x, y, plain=True).backward()
        for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(full(mine.grad), wanted.grad)
        with pytest.raises(CollectiveMismatchError, match=r"penalty\.full_tensor\(\)"):
            loss(model, x[own], y[own], plain=True).backward()

    run_ranks(2, program)


def test_mixed_precision() -> None:
    def program(rank: int) -> tuple[Any, ...]:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
        model = seeded()
        for block in model.blocks:
            fully_shard(block, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        fully_shard(model, mp_policy=policy)
        seen = []
        model.blocks[0].up.register_forward_hook(lambda m, a, out: seen.append(out.dtype))
        compare(rank, 2, model, seeded(), steps=1, tolerance=0.08)
        return seen[0], model.first.weight.dtype, model.first.weight.grad.dtype

    assert run_ranks(2, program)[0] == (torch.bfloat16, torch.float32, torch.float32)


def test_parameters_without_memory_are_made_where_they_lie() -> None:
    def program(rank: int) -> Tensor:
        with torch.device("meta"):
            model: Any = Net()
        shard_all(model)
        assert model.first.weight.is_meta
        model.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(7)
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5, generator=None)
        del generator
        plain: Any = Net()
        plain.load_state_dict({name: full(value) for name, value in model.state_dict().items()})
        compare(rank, 2, model, plain)
        return full(model.first.weight)

    first, second = run_ranks(2, program)
    assert torch.equal(first, second)


def test_casts() -> None:
    def program(rank: int) -> None:
        model = shard_all(seeded()).double()
        x, y = rows(2, 0)
        own = slice(2 * rank, 2 * rank + 2)
        plain = seeded().double()
        mse(model(x[own].double()), y[own].double()).backward()
        mse(plain(x.double()), y.double()).backward()
        assert_close(full(model.last.weight.grad), plain.last.weight.grad)

    run_ranks(2, program)


def test_state_dicts() -> None:
    def program(rank: int) -> None:
        model = shard_all(seeded(), reshard_after_forward=False)
        model(rows(2, 0)[0])
        state = model.state_dict()  # after a forward pass that has left full parameters
        assert all(isinstance(value, DTensor) for value in state.values())
        file = io.BytesIO()
        torch.save(state, file)
        other = shard_all(Net())
        other.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
        x, _ = rows(2, 1)
        assert_close(other(x), model(x))

    run_ranks(2, program)


def test_gathering_by_hand() -> None:
    def program(rank: int) -> None:
        model = shard_all(seeded())
        assert model.unshard() is None
        assert not isinstance(model.first.weight, DTensor)
        assert_close(model.first.weight, seeded().first.weight)
        model.reshard()
        assert isinstance(model.first.weight, DTensor)
        handle = model.blocks[0].unshard(async_op=True)
        handle.wait()
        assert model.blocks[0].up.weight.shape == (7, 10)
        model.blocks[0].reshard()
        model.blocks[0].reshard()

    run_ranks(2, program)


def test_other_methods_than_forward() -> None:
    class WithEncode(Net):
        def encode(self, x: Tensor) -> Tensor:
            y: Tensor = self.first(x)
            return y

    def program(rank: int) -> None:
        model: Any = fully_shard(WithEncode())
        register_fsdp_forward_method(model, "encode")
        assert model.encode(torch.ones(1, 6)).shape == (1, 10)
        with pytest.raises(ValueError, match="has no method 'decode'"):
            register_fsdp_forward_method(model, "decode")
        with pytest.raises(ValueError, match="was not given to fully_shard"):
            register_fsdp_forward_method(nn.Linear(1, 1), "forward")

    run_ranks(1, program)


def test_a_copy_computes_with_the_weights_of_the_copy() -> None:
    class WithEncode(nn.Linear):
        def encode(self, x: Tensor) -> Tensor:
            y: Tensor = self(x)
            return y

    def program(rank: int) -> list[float]:
        x, model = torch.ones(1, 2), fully_shard(WithEncode(2, 1))
        register_fsdp_forward_method(model, "encode")
        model.compile(backend="eager")
        copied = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.fill_(1.0)
        return [copied(x).item(), copied.encode(x).item()]

    assert run_ranks(2, program) == [[3.0, 3.0]] * 2


@pytest.mark.parametrize("explicit", [False, True])
def test_prefetching(explicit: bool) -> None:
    """A module's gather is started before the one before it computes."""

    def program(rank: int) -> None:
        model = shard_all(seeded())
        if explicit:
            for block, after in zip(model.blocks, model.blocks[1:], strict=False):
                block.set_modules_to_forward_prefetch([after])
                after.set_modules_to_backward_prefetch([block])
        compare(rank, 2, model, seeded())
        pending = []

        def look(module: nn.Module, args: Any) -> None:
            pending.append(model.blocks[1]._fsdp_state.phase == "gathering")

        model.blocks[0].up.register_forward_pre_hook(look)
        model(rows(2, 0)[0]).sum().backward()
        assert pending[0]

    run_ranks(2, program)


def test_full_parameters_are_there_while_they_are_needed(monkeypatch: Any) -> None:
    made: list[weakref.ref[GatheredParameters]] = []

    class Noted(GatheredParameters):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(weakref.ref(self))

    def full_bytes(model: Any) -> int:
        flats = {
            id(flat)
            for module in model.modules()
            if hasattr(module, "_fsdp_state")
            for flat in module._fsdp_state.flats
        }
        gathered = [each for ref in [*made] if (each := ref()) is not None]
        own = [each for each in gathered if flats.intersection(map(id, each.flats))]
        return sum(part.block.nbytes for each in own for part in each.parts)

    def program(rank: int) -> None:
        model = shard_all(seeded(), reshard_after_forward=True)
        sizes = [sum(p.numel() * 4 for p in block.parameters()) for block in seeded().blocks]
        rest = sum(p.numel() * 4 for p in seeded().parameters()) - sum(sizes)
        seen: list[int] = []
        for block in model.blocks:
            block.down.register_forward_hook(lambda *_: seen.append(full_bytes(model)))
            block.down.register_full_backward_hook(lambda *_: seen.append(full_bytes(model)))
        for _ in range(2):
            model(rows(2, 0)[0].requires_grad_()).sum().backward()
            assert full_bytes(model) == 0
        assert len(seen) == 12
        assert min(seen) > 0
        assert max(seen) <= rest + 2 * max(sizes)  # the next one is being gathered

    monkeypatch.setattr(unit, "GatheredParameters", Noted)
    monkeypatch.setattr(unit, "TOGETHER_BYTES", 0)
    run_ranks(2, program)


@pytest.mark.parametrize(("together", "first", "later"), [(0, 3, 4), (1500, 2, 2), (4000, 1, 1)])
def test_collectives_of_each_module_and_way(
    together: int, first: int, later: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small modules travel together, in forward once the order of the modules is known."""

    def program(rank: int) -> list[int]:
        model = shard_all(seeded())
        group = dist.get_default_group()
        counts = [group.get_sequence_number_for_group()]
        for _ in range(2):
            loss = model(rows(2, 0)[0]).sum()
            counts.append(group.get_sequence_number_for_group())
            loss.backward()
            counts.append(group.get_sequence_number_for_group())
        return [after - before for before, after in itertools.pairwise(counts)]

    monkeypatch.setattr(unit, "TOGETHER_BYTES", together)
    # Three blocks and the rest are gathered; the blocks again in backward, and all are reduced:
    # those together that one message of forward brought.
    assert run_ranks(2, program) == [[4, first + 4, later, first + later]] * 2


def test_a_module_that_forward_writes_to_after_it_was_gathered_ahead() -> None:
    def program(rank: int) -> None:
        plain: Any = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        model = copy.deepcopy(plain)
        for layer in (*model, model):
            fully_shard(layer)

        def write(each: Any) -> None:
            with torch.no_grad():
                each[2].weight.mul_(0.5)

        for each in (plain, model):
            each[0].register_forward_hook(lambda *_, each=each: write(each))
        with torch.no_grad():
            for _ in range(3):
                assert_close(model(torch.ones(1, 4)), plain(torch.ones(1, 4)))

    run_ranks(2, program)


def test_the_first_dim_with_a_row_for_each_rank_is_sharded() -> None:
    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.up, self.scale = nn.Parameter(torch.randn(1, 6, 5)), nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = (x @ self.up).sum() * self.scale.prod()
            return y

    def program(rank: int) -> None:
        plain, model = Expert(), fully_shard(Expert())
        assert model.up.placements == (Shard(1),)
        assert model.up.to_local().shape == (1, 2, 5)
        assert model.scale.placements == (Shard(0),)
        for each in (plain, model):
            each(torch.ones(1, 4, 6)).backward()
        for mine, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(full(mine.grad), wanted.grad)

    run_ranks(3, program)


def test_beside_batch_normalisation_over_all_rows() -> None:
    def program(rank: int) -> None:
        first = nn.Linear(6, 4, bias=False)  # a bias would have no gradient but rounding
        plain: Any = nn.Sequential(first, nn.BatchNorm1d(4), nn.Linear(4, 5))
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.uniform_(0.1, 1.0, generator=generator)
        model = fully_shard(SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain)))
        compare(rank, 2, model, plain)
        assert_close(model[1].running_var, plain[1].running_var)

    run_ranks(2, program)


def test_misuse() -> None:
    def program(rank: int) -> None:
        model = fully_shard(nn.Linear(2, 2))
        with pytest.raises(ValueError, match="was given to fully_shard before"):
            fully_shard(model)
        with pytest.raises(TypeError, match="call fully_shard on each module in it"):
            fully_shard(nn.ModuleList([nn.Linear(2, 2)]))
        with pytest.raises(NotImplementedError, match=r"'0' has sparse gradients"):
            fully_shard(nn.Sequential(nn.Embedding(4, 2, sparse=True)))
        scalar = nn.Module()
        scalar.register_parameter("p", nn.Parameter(torch.ones(())))
        with pytest.raises(ValueError, match=r"p of shape \[\] has no dim to shard: make it of"):
            fully_shard(scalar)
        with pytest.raises(ValueError, match="takes a mesh of one axis"):
            fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1, 1, 1)))
        outer = fully_shard(nn.Sequential(nn.Linear(2, 2)))
        with pytest.raises(ValueError, match="call fully_shard on inner modules before"):
            fully_shard(outer[0])
        fully_shard(nn.Linear(2, 2), offload_policy=CPUOffloadPolicy())

    run_ranks(1, program)


def test_offload_is_refused_where_a_mesh_is_not_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def program(rank: int) -> None:
        mesh, model = init_device_mesh("cuda", (1,)), nn.Linear(2, 2)
        with pytest.raises(NotImplementedError, match=r"mesh on \['cpu', 'cuda'\]: pass a module"):
            fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
        assert type(model.weight) is nn.Parameter

    run_ranks(1, program)


def test_copies_are_sharded_modules_of_their_own() -> None:
    """As an average of weights is kept; also within a module that is not sharded."""

    def program(rank: int) -> None:
        plain: Any = nn.Sequential(seeded())
        model: Any = nn.Sequential(shard_all(seeded()))
        average, plain_average = copy.deepcopy(model), copy.deepcopy(plain)
        own = slice(2 * rank, 2 * rank + 2)
        for each, inputs in ((model, own), (plain, slice(None))):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
            for step in range(2):
                x, y = rows(2, step)
                mse(each(x[inputs]), y[inputs]).backward()
                optimizer.step()
        for mean, now in ((average, model), (plain_average, plain)):
            with torch.no_grad():
                for old, new in zip(mean.parameters(), now.parameters(), strict=True):
                    old.lerp_(new, 0.5)
        assert type(average[0]) is type(model[0])
        assert average[0].first.weight is not model[0].first.weight
        assert_close(average(rows(2, 0)[0]), plain_average(rows(2, 0)[0]))
        average(rows(2, 0)[0][own]).sum().backward()
        assert average[0].first.weight.grad is not model[0].first.weight.grad
        with pytest.raises(TypeError, match=r"save model\.state_dict\(\)"):
            copy.copy(model[0])

    run_ranks(2, program)


@pytest.mark.parametrize("clears", [True, False])
def test_one_rank_that_does_not_clear_its_gradients(clears: bool) -> None:
    """Shards of another sum, which no rank sees by itself."""

    def program(rank: int) -> bool:
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            if clears or rank == 0 or step != 1:
                optimizer.zero_grad()
            model(torch.full((1, 3), rank + 1.0)).square().sum().backward()
            try:
                optimizer.step()
            except CollectiveMismatchError:
                return False
        return True

    assert run_ranks(2, program) == [clears, clears]
