"""Modules with DTensors under torch.compile: gradients are the module's own, to the bit."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.capture.test_inductor import LIMIT, has_compiler
from tests.capture.twins import nearly, same_bits
from tilework.comm.world import current_world
from tilework.dtensor import (
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from tilework.errors import CaptureError
from tilework.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
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


@pytest.mark.skipif(not has_compiler(), reason="Inductor needs a C++ compiler")
@pytest.mark.timeout(LIMIT.total_seconds())
def test_training_through_inductor() -> None:
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


def on_one_rank(program: Callable[[Any, Any, Callable[[], Tensor]], None]) -> None:
    def run(rank: int) -> None:
        model, batch = whole(1)
        model[3].p = 0.0
        compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
        program(model, compiled, batch)

    run_ranks(1, run)


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


def test_a_second_backward_pass_and_a_written_parameter_raise() -> None:
    def program(model: Any, compiled: Any, batch: Callable[[], Tensor]) -> None:
        for _ in range(3):
            loss = compiled(batch()).sum()
            loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="was called twice"):
            loss.backward()
        loss = compiled(batch()).sum()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        with pytest.raises(RuntimeError, match="written to after the forward pass"):
            loss.backward()

    on_one_rank(program)


def test_hooks_on_gradients_are_refused() -> None:
    def program(model: Any, compiled: Any, batch: Callable[[], Tensor]) -> None:
        model[0].weight.register_hook(lambda grad: grad * 2)
        compiled(batch())
        with pytest.raises(CaptureError, match="tensor with hooks, which would run twice"):
            compiled(batch())
        model[0].weight.grad = None
        partly: Any = torch.compile(model, backend="aot_eager")
        partly(batch())
        x = batch()
        with pytest.warns(UserWarning, match="runs Sequential as it is"):
            found = partly(x)
        found.sum().backward()
        grad = copy.copy(model[0].weight.grad)
        model[0].weight.grad = None
        model(x).sum().backward()
        assert same_bits(model[0].weight.grad, grad)

    on_one_rank(program)
