"""Modules with DTensors under torch.compile: gradients are the module's own, to the bit."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.capture.program.test_inductor import LIMIT, need_compiler
from tests.capture.twins import nearly, same_bits
from tilework.capture import modules
from tilework.comm.world import current_world
from tilework.dtensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from tilework.errors import CaptureError
from tilework.parallel import (
    ColwiseParallel,
    DistributedDataParallel,
    FSDPModule,
    RowwiseParallel,
    fully_shard,
    parallelize_module,
)
from tilework.testing import run_ranks


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Dropout(0.2), nn.Linear(16, 8)
    )


def whole(ranks: int) -> tuple[Any, Callable[[], Tensor]]:
    mesh = init_device_mesh("cpu", (ranks,))
    model = distribute_module(made(), mesh)
    return model, lambda: distribute_tensor(torch.randn(4 * ranks + 1, 8), mesh, [Shard(0)])


def in_layers(ranks: int) -> tuple[Any, Callable[[], Tensor]]:
    plan = {
        "0": ColwiseParallel(output_layouts=Replicate()),
        "4": RowwiseParallel(input_layouts=Replicate()),
    }
    model = parallelize_module(made(), init_device_mesh("cpu", (ranks,)), plan)
    model[3].p = 0.0  # type: ignore[index]  # of plain tensors: ranks would draw apart
    torch.manual_seed(5)
    return model, lambda: torch.randn(6, 8)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("make", [whole, in_layers])
def test_training_with_two_forward_passes_and_other_losses(make: Any, ranks: int) -> None:
    # Eager sums partial gradients of both calls before ranks reduce them, programs do so after.
    same = nearly if make is whole and ranks > 1 else same_bits
    run_ranks(ranks, _train, make, ranks, "aot_eager", same)


@pytest.mark.timeout(LIMIT.total_seconds())
def test_training_through_inductor() -> None:
    need_compiler()
    run_ranks(2, _train, in_layers, 2, "inductor", nearly, timeout=LIMIT)


def _train(rank: int, make: Any, ranks: int, backend: str, same: Any) -> None:
    warnings.simplefilter("ignore", FutureWarning)
    eager, batch = make(ranks)
    model, _ = make(ranks)
    compiled: Any = torch.compile(model, backend=backend, fullgraph=True)
    twins = [(eager, eager), (compiled, model)]
    optimizers = [torch.optim.AdamW(owner.parameters(), lr=0.01) for _, owner in twins]
    generator = current_world().generator
    assert generator is not None
    for number in range(6):
        batches, state = [batch(), batch()], generator.get_state()
        results = []
        for (run, _), optimizer in zip(twins, optimizers, strict=True):
            generator.set_state(state)
            optimizer.zero_grad()
            first, second = (run(x) for x in batches)
            loss = (first * first).mean() if number % 2 else first.sin().sum()
            (loss + second.square().sum()).backward()
            optimizer.step()
            results.append((first, second))
        for mine, other in zip(*results, strict=True):
            assert same(mine, other), f"result of step {number}"
        for (name, mine), other in zip(eager.named_parameters(), model.parameters(), strict=True):
            assert same(mine.grad, other.grad), f"gradient of {name} in step {number}"
            assert same(mine, other), f"{name} after step {number}"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, int, float]:
        length = x.shape[1]
        heads = self.qkv(x).view(*x.shape[:2], -1, 12).transpose(1, 2)
        q, k, v = heads.chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return (
            self.out(mixed.transpose(1, 2).reshape(*x.shape[:2], -1)) / length,
            length,
            x[0, 0, 0].item() * length,
        )


@pytest.mark.timeout(LIMIT.total_seconds())
@pytest.mark.parametrize("backend", ["python", "inductor"])
def test_sequences_of_all_lengths_have_one_program(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "inductor":
        need_compiler()
    recorded = []
    record = modules._record

    def counted(*args: Any) -> Any:
        recorded.append(args)
        return record(*args)

    monkeypatch.setattr(modules, "_record", counted)
    run_ranks(2, _train_on_lengths, backend, timeout=LIMIT)
    assert len(recorded) == 2 * 6  # of each rank, each length once


def _train_on_lengths(rank: int, backend: str) -> None:
    plan = {"qkv": ColwiseParallel(), "out": RowwiseParallel()}
    torch.manual_seed(0)
    eager = parallelize_module(Attention(), init_device_mesh("cpu", (2,)), plan)
    model = copy.deepcopy(eager)
    run = modules.compiled_function(model, backend)
    same: Any = same_bits if backend == "python" else nearly
    torch.manual_seed(1)
    for length in (5, 7, 12, 3, 9, 20, 2, 7):
        x = torch.randn(3, length, 8)
        results, lengths, numbers = zip(*[each(x) for each in (eager, run)], strict=True)
        assert same(*results)
        assert lengths == (length, length)
        assert numbers[0] == numbers[1]
        for owner, result in zip((eager, model), results, strict=True):
            owner.zero_grad()
            result.square().sum().backward()
        for (name, mine), other in zip(eager.named_parameters(), model.parameters(), strict=True):
            assert same(mine.grad, other.grad), f"{name} at {length}"


class WithPenalty(nn.Module):
    """A module that keeps a part of the loss, as mixtures of experts do."""

    penalty: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.penalty = self.linear.weight.square().sum()
        result: Tensor = self.linear(x)
        return result


def test_a_module_that_keeps_a_tensor_with_a_graph_runs_as_it_is() -> None:
    def run(rank: int) -> None:
        model = distribute_module(WithPenalty(), init_device_mesh("cpu", (1,)))
        compiled: Any = torch.compile(model, backend="aot_eager")
        compiled(torch.randn(2, 8))
        with pytest.warns(match="keeps penalty with a graph"):
            compiled(torch.randn(2, 8))
        for _ in range(2):
            model.zero_grad()
            (compiled(torch.zeros(2, 8)).sum() + model.penalty).backward()
            grad: Any = model.linear.weight.grad  # type: ignore[union-attr]
            assert grad.full_tensor().norm() > 0

    run_ranks(1, run)


def test_a_module_that_returns_a_parameter_runs_as_it_is_and_once() -> None:
    class Counts(nn.Module):
        calls: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Any:
            self.calls += 1
            return self.weight, x * self.weight

    def program(rank: int) -> float:
        mesh = init_device_mesh("cpu", (2,))
        model: Any = distribute_module(Counts(), mesh)
        fast: Any = torch.compile(model, backend="aot_eager")
        for _ in range(4):
            fast(distribute_tensor(torch.ones(3), mesh))
        return float(model.calls.item())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run_ranks(2, program) == [4.0, 4.0]


def test_gradients_of_arguments_that_were_one_tensor_in_the_recorded_call() -> None:
    compiled = modules.compiled_function(lambda q, k: q.sin() * k.square(), "python")
    for call in range(5):
        q = torch.randn(3, requires_grad=True)
        k = torch.randn(3, requires_grad=True) if call > 3 else q
        compiled(q, k).sum().backward()
        expected = [q.cos() * k.square(), 2 * q.sin() * k]
        expected = [sum(expected)] if k is q else expected  # type: ignore[list-item]
        for tensor, grad in zip((q, k), expected, strict=False):
            assert tensor.grad is not None
            torch.testing.assert_close(tensor.grad, grad)


def on_one_rank(program: Callable[[Any, Any, Callable[[], Tensor]], None]) -> None:
    def run(rank: int) -> None:
        model, batch = whole(1)
        model[3].p = 0.0
        compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
        program(model, compiled, batch)

    run_ranks(1, run)


def test_functions_of_plain_tensors_that_make_dtensors() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))

        def function(x: Tensor) -> Tensor:
            sharded: Any = DTensor.from_local(x, mesh, [Shard(0)])
            found: Tensor = sharded.sin().full_tensor() * 2
            return found

        compiled: Any = torch.compile(function, backend="aot_eager", fullgraph=True)
        for _ in range(4):
            x = torch.randn(2, 3, requires_grad=True)
            for run in (function, compiled):
                run(x).sum().backward()
            assert same_bits(compiled(x), function(x))
            assert x.grad is not None
            assert same_bits(x.grad, torch.autograd.grad(function(x).sum(), x)[0] * 2)

    run_ranks(2, program)


def test_modes_have_programs_of_their_own() -> None:
    def program(model: Any, compiled: Any, batch: Callable[[], Tensor]) -> None:
        model[3].p = 0.5
        for _ in range(3):
            compiled(batch())
        model.eval()
        for _ in range(3):
            x = batch()
            assert same_bits(compiled(x), model(x))
            with torch.no_grad():
                found = compiled(x)
                assert same_bits(found, model(x))
            assert not found.requires_grad

    on_one_rank(program)


def test_a_model_that_was_frozen_at_first_trains() -> None:
    def program(rank: int) -> None:
        model, batch = whole(1)
        compiled: Any = torch.compile(model, backend="aot_eager")
        model.eval().requires_grad_(False)
        for _ in range(2):
            assert not compiled(batch()).requires_grad
        model.requires_grad_(True)
        for _ in range(4):
            x = batch()
            found = torch.autograd.grad(compiled(x).sum(), [*model.parameters()])
            expected = torch.autograd.grad(model(x).sum(), [*model.parameters()])
            assert all(nearly(*pair) for pair in zip(found, expected, strict=True))

    run_ranks(1, program)


def test_graphs_that_stay_and_those_that_do_not() -> None:
    def program(model: Any, compiled: Any, batch: Callable[[], Tensor]) -> None:
        for _ in range(3):
            model.zero_grad()
            loss = compiled(batch()).sum()
            loss.backward(retain_graph=True)
        first = model[0].weight.grad.clone()
        loss.backward()
        assert nearly(first * 2, model[0].weight.grad)
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()
        loss = compiled(batch()).sum()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        with pytest.raises(RuntimeError, match="create_graph=True needs the gradient of a grad"):
            compiled(batch()).sum().backward(create_graph=True)

    on_one_rank(program)


def test_hooks_of_gradients_run_once_in_each_backward_pass() -> None:
    def program(model: Any, compiled: Any, batch: Callable[[], Tensor]) -> None:
        seen = []
        weight, bias = model[0].weight, model[0].bias
        weight.register_hook(lambda grad: grad * 2)
        bias.register_post_accumulate_grad_hook(lambda found: seen.append(copy.copy(found.grad)))
        for _ in range(4):
            x, grads = batch(), []
            for run in (model, compiled):
                model.zero_grad()
                run(x).sum().backward()
                grads.append((copy.copy(weight.grad), copy.copy(bias.grad)))
            for mine, other in zip(*grads, strict=True):
                assert same_bits(mine, other)
            assert same_bits(seen[-1], grads[-1][1])
        assert len(seen) == 8

    on_one_rank(program)


def in_units(ranks: int) -> tuple[Any, Callable[[], Tensor]]:
    mesh = init_device_mesh("cpu", (ranks,))
    model = nn.Sequential(*[fully_shard(made(), mesh=mesh) for _ in range(2)], nn.Linear(8, 3))
    return fully_shard(model, mesh=mesh), lambda: torch.randn(4, 8)


def in_units_and_layers(ranks: int) -> tuple[Any, Callable[[], Tensor]]:
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "tp"))
    block = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    parallelize_module(block, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = nn.Sequential(fully_shard(block, mesh=mesh["dp"]), nn.Linear(8, 3))
    return fully_shard(model, mesh=mesh["dp"]), _alike_along(mesh)


def replicas(ranks: int) -> tuple[Any, Callable[[], Tensor]]:
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Linear(8, 3))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    return DistributedDataParallel(model, device_mesh=mesh["dp"]), _alike_along(mesh)


def _alike_along(mesh: Any) -> Callable[[], Tensor]:
    """Makes batches that only ranks of different replicas have apart."""
    generator = torch.Generator().manual_seed(mesh.get_local_rank("dp"))
    return lambda: torch.randn(4, 8, generator=generator)


@pytest.mark.parametrize("is_in_place", [False, True])
@pytest.mark.parametrize(
    ("make", "ranks"), [(in_units, 1), (in_units, 2), (in_units_and_layers, 4), (replicas, 4)]
)
def test_modules_that_reduce_their_gradients(make: Any, ranks: int, is_in_place: bool) -> None:
    run_ranks(ranks, _train_reducing, make, ranks, is_in_place)


def _train_reducing(rank: int, make: Any, ranks: int, is_in_place: bool) -> None:
    twins = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        model, batch = make(ranks)
        run = model
        if is_compiled and is_in_place:
            model.compile(backend="aot_eager", fullgraph=True)
        elif is_compiled:
            run = torch.compile(model, backend="aot_eager", fullgraph=True)
        twins.append((run, model, torch.optim.AdamW(model.parameters(), lr=0.01)))
    generator = current_world().generator
    assert generator is not None
    for number in range(7):
        batches, state, losses = [batch() for _ in range(3)], generator.get_state(), []
        for run, model, optimizer in twins:
            generator.set_state(state)
            optimizer.zero_grad()
            if number == 5 and isinstance(model, FSDPModule):
                model.set_gradient_divide_factor(3.0)
            for at, x in enumerate(batches):
                is_last = at == 2
                if isinstance(model, FSDPModule):
                    model.set_requires_gradient_sync(is_last)
                with nullcontext() if is_last or not is_reducer(model) else model.no_sync():
                    loss = run(x).square().mean()
                    loss.backward()
            losses.append(loss.detach())
            optimizer.step()
        # Eager reduces the sum over the batches, a program the gradients of each.
        assert nearly(*losses), f"loss of step {number}"
        parameters = [model.named_parameters() for _, model, _ in twins]
        for (name, mine), (_, other) in zip(*parameters, strict=True):
            assert nearly(mine.grad, other.grad), f"gradient of {name} in step {number}"


def is_reducer(model: nn.Module) -> bool:
    return isinstance(model, DistributedDataParallel)


def test_a_module_within_one_that_is_sharded_runs_as_it_is() -> None:
    def program(rank: int) -> None:
        model, batch = in_units(1)
        x, block = batch(), model[0]
        for fullgraph in (False, True):
            model[0] = torch.compile(block, backend="aot_eager", fullgraph=fullgraph)
            if fullgraph:
                with pytest.raises(CaptureError, match="compile the outermost module"):
                    model(x)
            else:
                with pytest.warns(UserWarning, match="compile the outermost module"):
                    model(x).sum().backward()

    run_ranks(1, program)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which Dynamo reads of full parameters
def test_blocks_that_are_compiled_before_they_are_sharded() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        twins = []
        for is_compiled in (False, True):
            torch.manual_seed(0)
            blocks: list[Any] = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)]
            if is_compiled:
                blocks = [torch.compile(block, backend="aot_eager") for block in blocks]
            model = nn.Sequential(*[fully_shard(block, mesh=mesh) for block in blocks])
            twins.append(fully_shard(model, mesh=mesh))
        for _ in range(4):
            x = torch.randn(4, 8)
            for twin in twins:
                twin.zero_grad()
                twin(x).sum().backward()
            parameters = zip(*[twin.parameters() for twin in twins], strict=True)
            for mine, other in parameters:
                assert same_bits(mine.grad, other.grad)
                with torch.no_grad():
                    mine.sub_(mine.grad)
                    other.sub_(other.grad)

    run_ranks(2, program)
