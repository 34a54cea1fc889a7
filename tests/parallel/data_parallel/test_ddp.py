"""Replicas train as one module does on all rows; what is wrong is said by name, on all ranks."""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.data_parallel.models import (
    EACH_SETTING,
    ROWS,
    WIDTH,
    Branches,
    batch,
    compare_training,
    gradients,
    mlp,
    mse,
    same_gradients,
    seeded,
    train,
)
from tests.rounding import assert_close
from tilework.parallel import DistributedDataParallel
from tilework.testing import run_ranks


@EACH_SETTING
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gradients_are_those_of_all_rows(settings: dict[str, Any], ranks: int) -> None:
    train(mlp(), ranks, **settings)


@EACH_SETTING
def test_between_processes(settings: dict[str, Any]) -> None:
    model: Any = mlp()

    def program(rank: int) -> None:
        compare_training(rank, 2, model, **settings)

    run_ranks(2, program, kind="processes")


def test_bits_do_not_depend_on_buckets_or_runs() -> None:
    model: Any = mlp()

    def program(rank: int) -> list[Sequence[Tensor]]:
        results = []
        for megabytes in (1e-5, 1e-4, 1e-3, 25):
            ddp: Any = DistributedDataParallel(copy.deepcopy(model), bucket_cap_mb=megabytes)
            for step in range(2):
                ddp.zero_grad()
                x, y = batch(2, step)
                mse(ddp(x[rank::2]), y[rank::2]).backward()
            results.append(gradients(ddp))
        return results

    first, *others = [result for ranks in run_ranks(2, program) for result in ranks]
    for other in others:
        assert all(map(torch.equal, first, other))


class Shared(nn.Module):
    """One weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.a.weight = self.b.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x).tanh())
        return y


@EACH_SETTING
def test_shared_weights(settings: dict[str, Any]) -> None:
    train(seeded(Shared), **settings)


class Frozen(nn.Module):
    """A layer that can be frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.base(x))
        return y


def test_frozen_parameters_that_are_unfrozen_later() -> None:
    model: Any = seeded(Frozen)

    def program(rank: int) -> None:
        plain: Any = copy.deepcopy(model)
        ddp: Any = DistributedDataParallel(copy.deepcopy(model))
        x, y = batch(2)
        own = slice(rank * ROWS, (rank + 1) * ROWS)
        for frozen in (True, True, False, False, True):
            for each in (plain, ddp.module):
                each.base.requires_grad_(not frozen)
                each.zero_grad()
            mse(plain(x), y).backward()
            mse(ddp(x[own]), y[own]).backward()
            same_gradients(ddp.module, plain)

    run_ranks(2, program)


def test_a_module_that_changes_between_steps() -> None:
    model: Any = mlp()

    def program(rank: int) -> None:
        plain: Any = copy.deepcopy(model)
        ddp: Any = DistributedDataParallel(copy.deepcopy(model))
        x, y = batch(2)
        own = slice(rank * ROWS, (rank + 1) * ROWS)
        for step in range(3):
            if step == 1:
                extra = seeded(lambda: nn.Linear(WIDTH, WIDTH))
                for each in (plain, ddp.module):
                    each.append(copy.deepcopy(extra))
            plain.zero_grad()
            ddp.zero_grad()
            mse(plain(x), y).backward()
            mse(ddp(x[own]), y[own]).backward()
            same_gradients(ddp.module, plain)

    run_ranks(2, program)


@pytest.mark.parametrize("view", [False, True])
def test_gradients_accumulate_without_synchronisation(view: bool) -> None:
    model: Any = mlp()

    def program(rank: int) -> None:
        plain: Any = copy.deepcopy(model)
        ddp: Any = DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=view)
        own = slice(rank * ROWS, (rank + 1) * ROWS)
        for _ in range(2):
            plain.zero_grad()
            ddp.zero_grad()
            for part in range(3):
                x, y = batch(2, part)
                mse(plain(x), y).backward()
                if part < 2:
                    with ddp.no_sync():
                        mse(ddp(x[own]), y[own]).backward()
                else:
                    mse(ddp(x[own]), y[own]).backward()
            same_gradients(ddp, plain)

    run_ranks(2, program)


def test_accumulation_without_zeroing() -> None:
    model: Any = mlp()

    def program(rank: int) -> None:
        plain: Any = copy.deepcopy(model)
        ddp: Any = DistributedDataParallel(copy.deepcopy(model))
        own = slice(rank * ROWS, (rank + 1) * ROWS)
        for step in range(3):
            x, y = batch(2, step)
            mse(plain(x), y).backward()
            mse(ddp(x[own]), y[own]).backward()
            same_gradients(ddp, plain)

    run_ranks(2, program)


@EACH_SETTING
def test_two_forward_passes_before_one_backward(settings: dict[str, Any]) -> None:
    train(mlp(), run=lambda model, x: model(x) + model(2 * x), **settings)


def test_two_forward_passes_and_two_backward_passes() -> None:
    model: Any = mlp()

    def program(rank: int) -> None:
        plain: Any = copy.deepcopy(model)
        ddp: Any = DistributedDataParallel(copy.deepcopy(model))
        own = slice(rank * ROWS, (rank + 1) * ROWS)
        for each, rows in ((plain, slice(None)), (ddp, own)):
            losses = [mse(each(x[rows]), y[rows]) for x, y in (batch(2, 0), batch(2, 1))]
            for loss in losses:
                loss.backward()
        same_gradients(ddp, plain)

    run_ranks(2, program)


class Embedded(nn.Module):
    """A table with sparse gradients before a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(10, WIDTH, sparse=True)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.layer(self.table(ids))
        return y


@pytest.mark.parametrize("view", [False, True])
def test_sparse_gradients(view: bool) -> None:
    model: Any = seeded(Embedded)

    def program(rank: int) -> None:
        plain: Any = copy.deepcopy(model)
        ddp: Any = DistributedDataParallel(copy.deepcopy(model), gradient_as_bucket_view=view)
        for step in range(3):
            ids = torch.randint(10, (4, 3), generator=torch.Generator().manual_seed(step))
            plain.zero_grad()
            ddp.zero_grad()
            plain(ids).square().mean().backward()
            ddp(ids[rank * 2 : rank * 2 + 2]).square().mean().backward()
            assert ddp.module.table.weight.grad.is_sparse
            same_gradients(ddp, plain)

    run_ranks(2, program)


class ManyKinds(nn.Module):
    """Parameters of several dtypes, one of them complex, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.half_param = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))
        self.double_param = nn.Parameter(torch.ones(WIDTH, dtype=torch.double))
        self.complex_param = nn.Parameter(torch.ones(WIDTH, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.ones(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.half_param + x * self.double_param + (x * self.complex_param).abs()
        return y + self.empty.sum()


def test_parameters_of_many_dtypes() -> None:
    model = ManyKinds()
    train(model, tolerance={"rtol": 2e-2, "atol": 2e-2}, steps=2)


def test_a_module_on_two_devices() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.here = nn.Linear(2, 2)
            self.there = nn.Linear(2, 2, device="meta")

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.here(x), self.there(x.to("meta"))

    def program(rank: int) -> None:
        ddp: Any = DistributedDataParallel(seeded(Split), bucket_cap_mb=0.001)
        assert ddp.get_ddp_logging_data()["is_multi_device_module"]
        y, elsewhere = ddp(torch.full((1, 2), float(rank)))
        torch.autograd.backward([y.sum(), elsewhere.sum()])
        assert ddp.module.there.weight.grad.is_meta
        assert_close(ddp.module.here.weight.grad, torch.full((2, 2), 0.5))

    run_ranks(2, program)


def test_what_only_a_penalty_uses() -> None:
    """Its gradient may come before backward reaches an output."""
    train(
        mlp(),
        run=lambda m, x: m(x) + 0.01 * sum(p.square().sum() for p in m.parameters()),
        tolerance={"rtol": 1e-4, "atol": 1e-5},
    )
    model: Any = seeded(Branches)

    def program(rank: int) -> None:
        ddp: Any = DistributedDataParallel(copy.deepcopy(model))
        out = ddp(torch.full((1, WIDTH), float(rank)), True)
        (out.sum() + ddp.module.left.weight.sum() + ddp.module.left.bias.sum()).backward()
        assert ddp.module.left.bias.grad.tolist() == [1.0] * WIDTH

    run_ranks(2, program)


def test_the_module_by_itself_is_not_synchronised() -> None:
    def program(rank: int) -> float:
        ddp: Any = DistributedDataParallel(nn.Linear(1, 1))
        ddp.module(torch.full((1, 1), float(rank))).sum().backward()
        grad: float = ddp.module.weight.grad.item()
        return grad

    assert run_ranks(2, program) == [0.0, 1.0]


@pytest.mark.parametrize("delays", [False, True])
def test_a_dropped_wrapper_leaves_the_module_as_it_was(delays: bool) -> None:
    def program(rank: int) -> tuple[list[Tensor], Any]:
        first, last = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        delayed: dict[str, Any] = {
            "delay_all_reduce_named_params": [("1.weight", last.weight)],
            "param_to_hook_all_reduce": first.weight,
        }
        module = nn.Sequential(first, last)
        ddp = DistributedDataParallel(module, **(delayed if delays else {}))
        nn.init.ones_(first.weight)
        loss = ddp(torch.full((1, 1), float(rank))).sum()
        dropped = ref(ddp)
        del ddp
        loss.backward()
        return [first.weight, last.weight], dropped

    for weights, dropped in run_ranks(2, program):
        gc.collect()
        assert dropped() is None
        assert weights[1].grad == torch.full((1, 1), 0.5)
        assert not any(weight._post_accumulate_grad_hooks for weight in weights)


def test_gradients_of_inputs_only_are_not_reduced() -> None:
    def program(rank: int) -> None:
        plain, ddp = mlp(), DistributedDataParallel(mlp())
        x = batch(2)[0][:ROWS].requires_grad_()  # the same rows on each rank
        for each in (plain, ddp):
            (slope,) = torch.autograd.grad(each(x).square().sum(), x, create_graph=True)
            torch.autograd.backward(slope.square().sum())
        grads: Any = [p.grad for p in ddp.parameters() if p.grad is not None]
        wanted: Any = [p.grad for p in plain.parameters() if p.grad is not None]
        for mine, other in zip(grads, wanted, strict=True):
            assert_close(mine, other)

    run_ranks(2, program)


def test_gradients_of_parameters_by_autograd_grad_are_those_of_the_rank() -> None:
    def program(rank: int) -> None:
        plain, ddp = mlp(), DistributedDataParallel(mlp())
        x, y = batch(2)
        own = slice(rank * ROWS, (rank + 1) * ROWS)
        loss, local = mse(ddp(x[own]), y[own]), mse(plain(x[own]), y[own])
        given = torch.autograd.grad(loss, list(ddp.parameters()), retain_graph=True)
        wanted = torch.autograd.grad(local, list(plain.parameters()))
        for mine, other in zip(given, wanted, strict=True):
            assert_close(mine, other)
        loss.backward()
        mse(plain(x), y).backward()
        same_gradients(ddp.module, plain)

    run_ranks(2, program)


def test_a_module_that_is_cast_between_steps() -> None:
    def program(rank: int) -> None:
        ddp: Any = DistributedDataParallel(nn.Linear(80, 80))
        ddp(torch.ones(1, 80)).sum().backward()
        ddp.zero_grad()
        ddp.double()
        ddp(torch.full((1, 80), float(rank), dtype=torch.double)).sum().backward()
        assert ddp.module.weight.grad.eq(0.5).all()
        assert ddp.module.weight.grad.dtype == torch.double

    run_ranks(2, program)


def test_all_parameters_frozen_for_a_step() -> None:
    def program(rank: int) -> None:
        ddp: Any = DistributedDataParallel(nn.Linear(2, 2))
        for frozen in (False, True, False):
            ddp.module.requires_grad_(not frozen)
            out = ddp(torch.full((1, 2), float(rank)))
            assert out.requires_grad != frozen
            if not frozen:
                ddp.zero_grad()
                out.sum().backward()
        assert ddp.module.weight.grad.eq(0.5).all()

    run_ranks(2, program)


def test_sparse_gradients_of_what_is_no_embedding() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.ones(100, 80))

        def forward(self, ids: Tensor) -> Tensor:
            return nn.functional.embedding(ids, self.rows, sparse=True).sum()

    def program(rank: int) -> None:
        ddp: Any = DistributedDataParallel(Table())
        ddp(torch.tensor([1 + rank])).backward()
        assert ddp.module.rows.grad[1:3].eq(0.5).all()
        assert ddp.module.rows.grad.sum() == 80

    run_ranks(2, program)


def test_a_step_after_backward_has_raised() -> None:
    def program(rank: int) -> float:
        ddp: Any = DistributedDataParallel(nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 80)))
        for step in range(3):
            x = torch.full((1, 80), float(rank))
            hook = ddp.module[0].bias.register_hook(lambda grad: 1 / 0) if step == 1 else None
            ddp.zero_grad()
            if hook is None:
                ddp(x).sum().backward()
            else:
                with pytest.raises(ZeroDivisionError):
                    ddp(x).sum().backward()
                hook.remove()
        grad: float = ddp.module[1].bias.grad[0].item()
        return grad

    assert run_ranks(2, program) == [1.0, 1.0]
