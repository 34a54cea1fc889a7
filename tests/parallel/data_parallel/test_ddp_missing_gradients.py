"""Parameters that a step does not use: allowed where asked for, else named on all ranks."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.data_parallel.models import (
    ROWS,
    WIDTH,
    Branches,
    batch,
    mse,
    raised,
    same_gradients,
    seeded,
)
from tests.rounding import assert_close
from tilework.parallel import DistributedDataParallel
from tilework.testing import run_ranks


@pytest.mark.parametrize("view", [False, True])
def test_parameters_that_some_ranks_do_not_use(view: bool) -> None:
    model: Any = seeded(Branches)

    def program(rank: int) -> None:
        ddp: Any = DistributedDataParallel(
            copy.deepcopy(model), find_unused_parameters=True, gradient_as_bucket_view=view
        )
        x, y = batch(2)
        for _ in range(3):
            plain: Any = copy.deepcopy(ddp.module)
            plain.zero_grad()
            ddp.zero_grad()
            for r in range(2):
                own = slice(r * ROWS, (r + 1) * ROWS)
                (mse(plain(x[own], bool(r)), y[own]) / 2).backward()
            own = slice(rank * ROWS, (rank + 1) * ROWS)
            mse(ddp(x[own], bool(rank)), y[own]).backward()
            same_gradients(ddp.module, plain)

    run_ranks(2, program)


@pytest.mark.parametrize("view", [False, True])
def test_what_no_rank_uses_keeps_its_gradient(view: bool) -> None:
    model: Any = seeded(Branches)

    def program(rank: int) -> None:
        ddp: Any = DistributedDataParallel(
            copy.deepcopy(model), find_unused_parameters=True, gradient_as_bucket_view=view
        )
        x, _ = batch(2)
        ddp(x[:ROWS], True).sum().backward()
        assert ddp.module.left.weight.grad is None
        before = ddp.module.right.weight.grad.clone()
        ddp(x[:ROWS], False).sum().backward()
        assert torch.equal(ddp.module.right.weight.grad, before)

    run_ranks(2, program)


def test_sparse_tables_that_some_ranks_or_none_use() -> None:
    def program(rank: int) -> None:
        model: Any = Branches()
        model.left, model.right = (nn.Embedding(3, 2, sparse=True) for _ in range(2))
        ddp: Any = DistributedDataParallel(model, find_unused_parameters=True)
        ddp(torch.tensor([0]), False).sum().backward()
        assert ddp.module.right.weight.grad is None
        ddp(torch.tensor([1]), rank == 1).sum().backward()
        grads = [each.weight.grad.to_dense()[:, 0] for each in (ddp.module.left, ddp.module.right)]
        assert [grad.tolist() for grad in grads] == [[1, 0.5, 0], [0, 0.5, 0]]

    run_ranks(2, program)


def test_unused_parameters_are_named_on_all_ranks() -> None:
    def program(rank: int) -> None:
        ddp: Any = DistributedDataParallel(seeded(Branches))
        ddp(torch.ones(1, WIDTH), True).sum().backward()

    for text in raised(2, program):
        assert "depend on left.bias and 1 more: no gradient on any rank" in text
        assert "left.weight (Linear, [8, 8]), left.bias (Linear, [8])" in text
        assert "right" not in text
        assert "find_unused_parameters=True" in text


def test_ranks_with_different_graphs_all_raise() -> None:
    def program(rank: int) -> None:
        ddp: Any = DistributedDataParallel(seeded(Branches), bucket_cap_mb=0.0001)
        ddp(torch.ones(1, WIDTH), rank == 1).sum().backward()

    for text in raised(3, program):
        assert "no gradient on some ranks" in text
        assert re.search(r"rank 0: right\.weight.*\n  rank 1: left\.weight", text)


@pytest.mark.parametrize("ranks", [1, 2])
def test_optimizers_that_step_in_hooks_are_refused(ranks: int) -> None:
    def program(rank: int) -> None:
        ddp: Any = DistributedDataParallel(seeded(Branches))
        for parameter in ddp.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)

            def step(_: Tensor, optimizer: Any = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
        x = torch.full((1, WIDTH), float(rank))
        (ddp(x, True) + ddp(x, False)).sum().backward()

    for text in raised(ranks, program):
        assert ("cleared during backward" if ranks == 1 else "is not the same") in text
        assert "call an optimizer's step() and zero_grad() after backward" in text


def test_a_step_after_such_an_error_works() -> None:
    def program(rank: int) -> Tensor:
        ddp: Any = DistributedDataParallel(seeded(Branches))
        with pytest.raises(RuntimeError, match="no gradient on any rank"):
            ddp(torch.ones(1, WIDTH), True).sum().backward()
        ddp.zero_grad()
        x = torch.full((1, WIDTH), float(rank))
        (ddp(x, True) + ddp(x, False)).sum().backward()
        grad: Tensor = ddp.module.left.weight.grad
        return grad

    assert_close(run_ranks(2, program)[0], torch.full((WIDTH, WIDTH), 0.5))
