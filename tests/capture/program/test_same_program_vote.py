"""Ranks decide together how to run a call, and forget programs with their groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import tilework.distributed as dist
from tests.capture.twins import same_bits
from tilework.capture import capture
from tilework.distributed.functional import all_to_all_single
from tilework.parallel import fully_shard
from tilework.testing import run_ranks


def test_a_step_is_recorded_again_by_the_ranks_that_are_left() -> None:
    def program(rank: int) -> float:
        total = torch.zeros(1)

        @capture
        def step() -> None:
            x = torch.ones(1)
            dist.all_reduce(x)
            total.add_(x)

        for _ in range(4):
            step()
        if rank < 2:
            dist.shrink_group([2])
            for _ in range(4):
                step()
        return total.item()

    assert run_ranks(3, program) == [20.0, 20.0, 12.0]


def test_ranks_with_batches_of_other_sizes_record_together() -> None:
    def program(rank: int) -> None:
        torch.manual_seed(0)
        plain, sharded = (fully_shard(nn.Linear(4, 3)) for _ in range(2))
        sharded.load_state_dict(plain.state_dict())
        compiled: Any = torch.compile(sharded, backend="eager")
        for size in [4, 4, 5, 4, 6, 4, 5] if rank else [4, 4, 4, 7, 4, 5, 5]:
            x = torch.randn(size, 4)
            assert same_bits(compiled(x), plain(x))
            for model in (compiled, plain):
                model.zero_grad()
                model(x).sum().backward()
            assert same_bits(sharded.weight.grad, plain.weight.grad)

    run_ranks(2, program)


def test_ranks_record_together_where_functional_collectives_are_all_that_they_share() -> None:
    def program(rank: int) -> list[float]:
        @capture
        def step(x: torch.Tensor) -> torch.Tensor:
            return all_to_all_single(x, group=None).sum() + int(x[0] > 3)

        branches = [0, 0, 5 * rank, 0, 0, 0]  # another branch on a single rank
        calls = [torch.tensor([float(x), 10.0 * n]) for n, x in enumerate(branches)]
        return [step(x).item() for x in calls]

    assert run_ranks(2, program) == [
        [0.0, 0.0, 5.0, 0.0, 0.0, 0.0],
        [0.0, 20.0, 41.0, 60.0, 80.0, 100.0],
    ]


def test_ranks_vote_where_they_branch_on_what_an_all_reduce_has_left_alone() -> None:
    def program(rank: int) -> list[float]:
        @capture
        def step(x: torch.Tensor) -> torch.Tensor:
            both = x.clone()
            dist.all_reduce(both[1:])
            return both[1] + int(both[0] > 3)

        branches = [0, 0, 5 * rank, 0, 0]  # another branch on a single rank
        return [step(torch.tensor([float(x), 10.0 * n])).item() for n, x in enumerate(branches)]

    assert run_ranks(2, program) == [
        [0.0, 20.0, 40.0, 60.0, 80.0],
        [0.0, 20.0, 41.0, 60.0, 80.0],
    ]
