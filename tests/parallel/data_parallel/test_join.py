"""Ranks with different numbers of inputs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilework.distributed as dist
from tests.parallel.data_parallel.models import WIDTH, batch, mlp, mse, same_gradients
from tilework.comm.contract import ProcessGroup
from tilework.comm.world import current_world
from tilework.parallel import DistributedDataParallel, Join, Joinable, JoinHook, SyncBatchNorm
from tilework.testing import run_ranks


@pytest.mark.parametrize(
    "settings", [{}, {"gradient_as_bucket_view": True}], ids=["copied", "view"]
)
@pytest.mark.parametrize("by_all", [True, False], ids=["by-all", "by-active"])
def test_gradients_are_those_of_the_rows_that_there_are(
    settings: dict[str, Any], by_all: bool
) -> None:
    model: Any = mlp()
    counts = [1, 4, 2]

    def program(rank: int) -> None:
        plain: Any = copy.deepcopy(model)
        ddp: Any = DistributedDataParallel(copy.deepcopy(model), **settings)
        with ddp.join(divide_by_initial_world_size=by_all):
            for step in range(counts[rank]):
                ddp.zero_grad()
                plain.zero_grad()
                x, _ = batch(3, step)
                there = [r for r, count in enumerate(counts) if step < count]
                for r in there:
                    (plain(x[r::3]).square().mean() / (3 if by_all else len(there))).backward()
                ddp(x[rank::3]).square().mean().backward()
                same_gradients(ddp, plain)

    run_ranks(3, program)


def test_all_ranks_end_with_one_model() -> None:
    def program(rank: int) -> list[Tensor]:
        ddp: Any = DistributedDataParallel(mlp())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with ddp.join():
            for step in range(2 + 3 * rank):
                optimizer.zero_grad()
                ddp(batch(1, step)[0]).square().mean().backward()
                optimizer.step()
        ddp.zero_grad()
        ddp(batch(1)[0] * rank).sum().backward()  # the group is whole again
        return [p.detach() for p in ddp.parameters()]

    ranks = run_ranks(3, program)
    for other in ranks[1:]:
        assert all(map(torch.equal, ranks[0], other))


@pytest.mark.parametrize("counts", [(0, 2), (2, 0)])
def test_a_rank_without_inputs_has_some_in_the_next_epoch(counts: tuple[int, int]) -> None:
    def program(rank: int) -> float:
        ddp: Any = DistributedDataParallel(nn.Linear(1, 1, bias=False))
        for count in (counts[rank], 2, 2):
            with ddp.join():
                for _ in range(count):
                    ddp.zero_grad()
                    ddp(torch.full((1, 1), rank + 1.0)).sum().backward()
        grad: float = ddp.module.weight.grad.item()
        return grad

    assert run_ranks(2, program) == [1.5, 1.5]


def test_a_parameter_that_thaws_does_not_change_the_divisor() -> None:
    def program(rank: int) -> list[float]:
        ddp: Any = DistributedDataParallel(nn.Linear(1, 1))
        ddp.module.bias.requires_grad_(False)
        grads = []
        with ddp.join(divide_by_initial_world_size=False):
            for step in range(2 + rank):
                ddp.module.bias.requires_grad_(step > 0)
                ddp.zero_grad()
                ddp(torch.ones(1, 1)).sum().backward()
                grads.append(ddp.module.weight.grad.item())
        return grads

    assert run_ranks(2, program) == [[1.0, 1.0], [1.0, 1.0, 1.0]]


def test_batch_statistics_of_the_ranks_that_have_inputs() -> None:
    def program(rank: int) -> list[float]:
        net: Any = nn.Sequential(nn.Linear(WIDTH, 3), nn.BatchNorm1d(3))
        nn.init.ones_(net[0].weight)
        nn.init.zeros_(net[0].bias)
        ddp: Any = DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(net))
        means = []
        with ddp.join():
            for _ in range(1 + rank):
                out = ddp(torch.full((2, WIDTH), float(rank)))
                means.append(round(out.mean().item(), 3))
                out.square().sum().backward()
        return means

    first, second = run_ranks(2, program)
    assert first[0] == -second[0] != 0
    assert second[1] == 0


def test_accumulation_within_join() -> None:
    model: Any = mlp()

    def program(rank: int) -> None:
        ddp: Any = DistributedDataParallel(copy.deepcopy(model))
        with ddp.join():
            for step in range(2 + rank):
                ddp.zero_grad()
                with ddp.no_sync():
                    ddp(batch(1, step)[0]).square().mean().backward()
                ddp(batch(1, step + 10)[0]).square().mean().backward()

    run_ranks(2, program)


def test_two_modules_in_one_context() -> None:
    def program(rank: int) -> None:
        first, second = (DistributedDataParallel(mlp()) for _ in range(2))
        with Join([first, second], divide_by_initial_world_size=False):
            for step in range(1 + 2 * rank):
                x = batch(1, step)[0]
                loss = mse(second(first(x)), x)
                loss.backward()
        assert loss.isfinite()

    run_ranks(2, program)


def test_contexts_within_each_other() -> None:
    def program(rank: int) -> None:
        outer, inner = (DistributedDataParallel(mlp()) for _ in range(2))
        with outer.join():
            for step in range(1 + rank):
                x = batch(1, step)[0]
                outer(x).square().mean().backward()
        with inner.join(), outer.join(enable=False):
            for step in range(2 - rank):
                x = batch(1, step)[0]
                inner(outer.module(x)).square().mean().backward()

    run_ranks(2, program)


def test_ending_as_soon_as_one_rank_has_run_out() -> None:
    def program(rank: int) -> int:
        ddp: Any = DistributedDataParallel(mlp())
        steps = 0

        def train() -> None:
            nonlocal steps
            with ddp.join(throw_on_early_termination=True):
                for step in range(1 + rank):
                    ddp(batch(1, step)[0]).sum().backward()
                    steps += 1

        with pytest.raises(RuntimeError, match="a rank has run out of inputs"):
            train()
        return steps

    assert run_ranks(3, program) == [1, 1, 1]


class Counter(Joinable):
    """Counts the iterations of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.own = self.followed = 0
        self.last: bool | None = None

    def step(self) -> None:
        Join.notify_join_context(self)
        self.own += 1

    def join_hook(self, **kwargs: Any) -> JoinHook:
        counter = self

        class Hook(JoinHook):
            def main_hook(self) -> None:
                counter.followed += 1

            def post_hook(self, is_last_joiner: bool) -> None:
                counter.last = is_last_joiner

        return Hook()

    @property
    def join_process_group(self) -> ProcessGroup:
        return dist.get_default_group()


def test_joinables_of_your_own() -> None:
    def program(rank: int) -> tuple[int, int, bool | None]:
        counter = Counter()
        with Join([counter]):
            for _ in range(2 * rank):
                counter.step()
        counter.step()  # outside of the context nobody is told
        return counter.own, counter.followed, counter.last

    assert run_ranks(3, program) == [(1, 4, False), (3, 2, False), (5, 0, True)]


def test_the_end_closes_the_groups_of_ranks_with_inputs() -> None:
    def program(rank: int) -> list[int]:
        counter = Counter()
        groups: list[int] = []
        for epoch in range(2):
            with Join([counter]):
                for _ in range(2 * rank + epoch):
                    counter.step()
                groups.append(len(current_world().records))
            groups.append(len(current_world().records))
        return groups

    assert run_ranks(3, program) == [[1, 1, 1, 1], [2, 1, 2, 1], [3, 1, 3, 1]]


def test_misuse() -> None:
    def program(rank: int) -> None:
        with pytest.raises(ValueError, match="at least one joinable"):
            Join([])
        own, _ = dist.new_subgroups(group_size=1)
        other = DistributedDataParallel(mlp(), process_group=own)
        with pytest.raises(ValueError, match="must be on one group"):
            Join([Counter(), other])

    run_ranks(2, program)


def test_what_is_raised_within_is_not_hidden() -> None:
    def program(rank: int) -> None:
        ddp: Any = DistributedDataParallel(mlp())
        with pytest.raises(KeyError), ddp.join():
            raise KeyError
        assert ddp.join_context is None

    run_ranks(2, program)
