"""Modules, optimizers and what else a training loop calls, on DTensors against plain tensors."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from tests.dtensor.op_checks import check_op
from tests.dtensor.sharded_values import collectives, cut, full, same, spread
from tests.rounding import assert_close
from tilework.dtensor import DTensor, Placement, Replicate, Shard, init_device_mesh
from tilework.testing import run_ranks

torch.manual_seed(11)
MODEL: Any = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
X, Y = torch.randn(3, 6, 5), torch.randn(3, 6, 3)
#: Rows of weights are cut unevenly, columns of the second evenly, one bias not at all.
CUTS: Mapping[str, Sequence[Placement]] = {
    "0.weight": [Shard(0)],
    "0.bias": [Shard(0)],
    "2.weight": [Shard(1)],
}


def steps(
    module: Any, optimizer: optim.Optimizer, batches: Sequence[tuple[Any, Any]], closure: bool
) -> None:
    """One step of training for each batch."""
    for x, y in batches:

        def loss(x: Any = x, y: Any = y) -> Any:
            optimizer.zero_grad()
            found = (module(x) - y).square().mean()
            found.backward()
            return found

        if closure:
            optimizer.step(loss)
        else:
            loss()
            optimizer.step()


OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "SGD foreach": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p, lr=0.1),
    "AdamW foreach": lambda p: optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW fused": lambda p: optim.AdamW(p, lr=0.1, fused=True),
    "NAdam": lambda p: optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: optim.RAdam(p, lr=0.1),
    "Adamax": lambda p: optim.Adamax(p, lr=0.1),
    "Adadelta": lambda p: optim.Adadelta(p, lr=0.5),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "Adagrad fused": lambda p: optim.Adagrad(p, lr=0.1, fused=True),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "Rprop": lambda p: optim.Rprop(p, lr=0.1),
    "ASGD": lambda p: optim.ASGD(p, lr=0.1),
    "LBFGS": lambda p: optim.LBFGS(p, lr=0.5, max_iter=4),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.1),
}


class Careful(optim.AdamW):
    """A subclass may do other things, so it goes through every operator."""


OPTIMIZERS["subclass"] = lambda p: Careful(p, lr=0.1)
OPTIMIZERS["subclass foreach"] = lambda p: Careful(p, lr=0.1, foreach=True)
OPTIMIZERS["subclass fused"] = lambda p: Careful(p, lr=0.1, fused=True)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    make, closure = OPTIMIZERS[name], name == "LBFGS"
    plain = copy.deepcopy(MODEL).double()
    optimizer = make(plain.parameters())
    batches = [(x.double(), y.double()) for x, y in zip(X, Y, strict=True)]
    steps(plain, optimizer, batches, closure)
    half = copy.deepcopy(MODEL).double()
    first = make(half.parameters())
    steps(half, first, batches[:1], closure)

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        data = [(cut(x, mesh, [Shard(0)]), cut(y, mesh, [Shard(0)])) for x, y in batches]
        module = spread(copy.deepcopy(MODEL).double(), mesh, CUTS)
        mine = make(module.parameters())
        steps(module, mine, data[:1], closure)
        for state in mine.state_dict()["state"].values():
            for value in state.values():
                if isinstance(value, Tensor) and value.dim():
                    assert isinstance(value, DTensor) or closure
        # The rest is done by another optimizer, from the state of the first.
        again = make(module.parameters())
        again.load_state_dict(mine.state_dict())
        steps(module, again, data[1:], closure)
        for param, want in zip(module.parameters(), plain.parameters(), strict=True):
            assert_close(full(param), want.detach(), rtol=1e-6, atol=1e-6)

    run_ranks(2, program)


def test_a_step_on_local_tensors_changes_nothing_else() -> None:
    """Learning rates that a scheduler sets, new groups, hooks, exceptions in closures."""

    def train(module: Any, batches: Any) -> Any:
        params = list(module.parameters())
        groups: list[Any] = [{"params": params[:2]}, {"params": params[2:], "lr": 0.01}]
        optimizer = optim.AdamW(groups, lr=0.1)
        scheduler = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        seen: list[Any] = []
        optimizer.register_step_pre_hook(lambda one, args, kwargs: seen.append(one is optimizer))
        optimizer.register_step_post_hook(lambda one, args, kwargs: seen.append(one is optimizer))

        def fails() -> float:
            raise ZeroDivisionError

        for x, y in batches:
            (module(x) - y).square().mean().backward()
            with pytest.raises(ZeroDivisionError):
                optimizer.step(fails)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=False)
        assert all(seen)
        assert all(one is other for one, other in zip(params, _params(optimizer), strict=True))
        assert set(optimizer.state) == set(params)
        return optimizer

    plain = copy.deepcopy(MODEL)
    wanted = train(plain, list(zip(X, Y, strict=True)))

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        module = spread(MODEL, mesh, CUTS)
        data = [
            (cut(x, mesh, [Shard(0)]), cut(y, mesh, [Shard(0)])) for x, y in zip(X, Y, strict=True)
        ]
        mine = train(module, data)
        for param, want in zip(module.parameters(), plain.parameters(), strict=True):
            assert_close(full(param), want.detach())
            assert param.grad.placements == param.placements
            assert not full(param.grad).any()
        for got, want in zip(mine.state.values(), wanted.state.values(), strict=True):
            assert float(got["step"]) == float(want["step"])
            same(got["exp_avg"], want["exp_avg"])
            # What the state shows is what the step uses.
        exp_avg = mine.state[module[0].weight]["exp_avg"]
        assert exp_avg.placements == (Shard(0),)

    run_ranks(2, program)


def _params(optimizer: optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping(norm_type: float, foreach: bool | None) -> None:
    def run(module: Any, x: Any) -> Any:
        module(x).square().sum().backward()
        total = nn.utils.clip_grad_norm_(module.parameters(), 0.5, norm_type, foreach=foreach)
        nn.utils.clip_grad_value_(module.parameters(), 0.1, foreach=foreach)
        return total

    plain = copy.deepcopy(MODEL)
    wanted = run(plain, X[0])

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        module = spread(MODEL, mesh, CUTS)
        total = run(module, cut(X[0], mesh, [Shard(0)]))
        assert_close(full(total), wanted)
        for param, want in zip(module.parameters(), plain.parameters(), strict=True):
            same(param.grad, want.grad)

    run_ranks(2, program)


def test_casts_of_modules() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        module = spread(MODEL, mesh, CUTS)
        weight: Any = module[0].weight
        for dtype in (torch.bfloat16, torch.half, torch.double, torch.float):
            module.to(dtype)
            assert module[0].weight is weight
            assert isinstance(weight, DTensor)
            assert isinstance(weight, nn.Parameter)
            assert weight.dtype == weight.to_local().dtype == dtype
            assert torch.Tensor.dtype.__get__(weight) == dtype  # type: ignore[attr-defined]
            assert weight.requires_grad
            assert weight.is_leaf
            x = cut(X[0].to(dtype), mesh, [Shard(0)])
            module(x).sum().backward()
            grad: Any = weight.grad
            assert grad.dtype == dtype
            assert grad.placements == (Shard(0),)
            module.zero_grad()
        module = spread(MODEL, mesh, CUTS).half().float()
        same(module[0].weight, MODEL[0].weight.half().float())

    run_ranks(2, program)


def test_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = MODEL(X[0])
    plain = copy.deepcopy(MODEL)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain(X[0]).float().square().sum().backward()

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        module = spread(MODEL, mesh)
        x = cut(X[0], mesh, [Shard(0)])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = module(x)
            loss = out.float().square().sum()
        assert out.dtype == torch.bfloat16
        assert_close(full(out), wanted.detach())
        loss.backward()
        for param, want in zip(module.parameters(), plain.parameters(), strict=True):
            assert param.grad.dtype == torch.float
            assert_close(full(param.grad), want.grad, rtol=2e-2, atol=2e-2)

    run_ranks(2, program)


def test_copies_and_files() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        module = spread(MODEL, mesh, CUTS)
        module[0].weight.sum().backward()
        twin = copy.deepcopy(module)
        file = io.BytesIO()
        torch.save(module.state_dict(), file)
        file.seek(0)
        loaded = spread(MODEL, mesh)  # replicated: what is loaded is laid out as it is
        with torch.no_grad():
            for param in loaded.parameters():
                param.zero_()
        loaded.load_state_dict(torch.load(file))
        for other in (twin, loaded):
            for param, want in zip(other.parameters(), module.parameters(), strict=True):
                assert isinstance(param, DTensor)
                assert isinstance(param, nn.Parameter)
                assert param.is_leaf
                assert param is not want
                assert_close(full(param), full(want))
        assert twin[0].weight.placements == (Shard(0),)
        assert loaded[0].weight.placements == (Replicate(),)
        assert twin[0].weight.grad is None  # as of torch's parameters
        loaded.load_state_dict(MODEL.state_dict())  # plain ones count as replicated
        same(loaded[0].weight, MODEL[0].weight)
        with torch.no_grad():
            twin[0].weight.zero_()
        assert full(module[0].weight).any()

    run_ranks(2, program)


def test_hooks_of_modules() -> None:
    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        module = spread(MODEL, mesh, CUTS)
        seen: list[Any] = []
        module[0].register_forward_hook(lambda *args: seen.append(args[2].placements))
        module[0].register_forward_pre_hook(lambda *args: seen.append(args[1][0].placements))
        module(cut(X[0], mesh, [Shard(0)]))
        assert len(seen) == 2

    run_ranks(2, program)


def test_full_backward_hooks_of_modules() -> None:
    """torch puts a Function of its own around the module: gradients go through it."""
    plain = copy.deepcopy(MODEL)
    wanted: list[Tensor] = []
    plain[2].register_full_backward_hook(lambda _, __, out: wanted.append(out[0]))
    plain(X[0]).square().sum().backward()

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        module = spread(MODEL, mesh)
        seen: list[Any] = []
        module[2].register_full_backward_hook(lambda _, __, out: seen.append(out[0]))
        module(cut(X[0], mesh, [Shard(0)])).square().sum().backward()
        for param, want in zip(module.parameters(), plain.parameters(), strict=True):
            same(param.grad, want.grad)
        same(seen[0], wanted[0])

    run_ranks(2, program)


def test_accumulation_costs_one_reduction_per_backward() -> None:
    plain = copy.deepcopy(MODEL)
    for x, y in zip(X, Y, strict=True):
        (plain(x) - y).square().mean().backward()

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        module = spread(MODEL, mesh)
        for i, (x, y) in enumerate(zip(X, Y, strict=True)):
            there = cut(x, mesh, [Shard(0)]), cut(y, mesh, [Shard(0)])
            loss = (module(there[0]) - there[1]).square().mean()
            with collectives() as entered:
                loss.backward()
            assert i == 0 or entered == ["all_reduce"]
        for param, want in zip(module.parameters(), plain.parameters(), strict=True):
            same(param.grad, want.grad)

    run_ranks(2, program)


GRID = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))


def test_norms_of_gradients_are_clipped_as_of_plain_ones() -> None:
    """pytorch#159856: ``clip_grad_norm_`` where gradients lie in any way."""

    def clipped(x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
        params = [one.detach().clone().requires_grad_() for one in (w, b)]
        F.linear(x, *params).square().sum().backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(params, 1.0)
        return [norm.detach(), *[one.grad for one in params if one.grad is not None]]

    w, b = torch.randn(3, 6), torch.randn(3)
    check_op(clipped, GRID, w, b, grads=False, most=12, meshes=((2,), (2, 2)), rtol=1e-5, atol=1e-5)


EVERY_PLACEMENT: list[Placement] = [Replicate(), Shard(0), Shard(1)]


def test_scaled_gradients_are_unscaled_in_every_layout() -> None:
    """By ``GradScaler``: once, and one rank's overflow makes all ranks skip the step."""

    def program(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2))
        for placements in itertools.product(EVERY_PLACEMENT, repeat=2):
            weight = nn.Parameter(cut(GRID, mesh, placements))
            optimizer = torch.optim.SGD([weight], 0.5)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            factor = cut(GRID, mesh, placements[::-1])
            scaler.scale((weight * factor).sum()).backward()
            scaler.unscale_(optimizer)
            same(weight.grad, GRID)
            scaler.step(optimizer)
            scaler.update()
            same(weight, GRID / 2)
            assert weight.grad is not None
            weight.grad[3, 5] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            same(weight, GRID / 2)
            assert scaler.get_scale() == 4

    run_ranks(4, program)
