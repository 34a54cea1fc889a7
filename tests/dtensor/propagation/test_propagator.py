"""The cache of sharding propagation, and what a step leaves behind."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.dtensor.sharded_values import cut
from tests.rounding import assert_close
from tilework.dtensor import DTensor, Shard, init_device_mesh
from tilework.testing import run_ranks

GRID = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


def test_decisions_do_not_grow_while_a_program_repeats_itself() -> None:
    """pytorch#168255, Automodel#2888: operators on lists, numbers that change, losses asked for."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Linear(6, 4)
        for name, param in list(model.named_parameters()):
            setattr(model, name, nn.Parameter(cut(param, mesh, [Shard(0)])))
        optimizers = [
            torch.optim.AdamW(model.parameters(), foreach=True),
            torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=False),
        ]
        x = cut(GRID, mesh, [Shard(0)])

        def step(i: int) -> None:
            scale = 1 + i / 7
            loss = model(x * scale + i).clamp(max=scale).square().mean() / (i + 1)
            loss.backward()
            torch.stack([loss.detach() * scale] * 3).sum().item()
            nn.utils.clip_grad_norm_(model.parameters(), scale)
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
                optimizer.step()
            model.zero_grad()
            torch._foreach_mul_([x, x], scale)

        for i in range(3):
            step(i)
        known, specs = len(mesh.op_shardings), len(mesh.specs)
        for i in range(3, 23):
            step(i)
        assert (len(mesh.op_shardings), len(mesh.specs)) == (known, specs)

    run_ranks(2, program)


def test_nothing_is_left_of_what_a_step_made() -> None:
    """pytorch#168255: tensors, graphs and works of a step are freed with it."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (1,))
        weight = cut(GRID, mesh, [Shard(0)]).requires_grad_()

        def step() -> None:
            ((weight * 2).sum(1).relu().mean() + weight[1].norm()).backward()
            weight.grad = None

        def living() -> int:
            gc.collect()
            return sum(type(one) is DTensor for one in gc.get_objects())

        step()
        before = living()
        for _ in range(5):
            step()
        assert living() <= before

    run_ranks(1, program)


def test_a_selective_checkpoint_sees_no_trials() -> None:
    """It would keep what they give, and hand it out when it computes again."""
    keep = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (3,))
        x = cut(GRID, mesh, [Shard(0)]).requires_grad_()  # the last rank has no rows
        weight = cut(GRID.t(), mesh, [Shard(1)]).requires_grad_()
        step: Any = checkpoint(
            lambda x: (x @ weight).sin().exp(), x, use_reentrant=False, context_fn=keep
        )
        step.sum().backward()
        plain = GRID.clone().requires_grad_()
        (plain @ GRID.t()).sin().exp().sum().backward()  # type: ignore[no-untyped-call]
        assert_close(x.grad.full_tensor(), plain.grad)

    run_ranks(3, program)
