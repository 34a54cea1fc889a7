"""Optimizers, schedulers, clipping, accumulation, scaling and averaging."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as lrs

from tests.capture.ordinary.data import labelled, mlp, rows
from tests.capture.ordinary.running import Capture, Made, calls, fit, fitted, program, states

OPTIMIZERS: dict[str, Any] = {
    "sgd_momentum_nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "sgd_fused": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1, fused=True),
    "adam_amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adamw_fused": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1, fused=True),
    "adamw_foreach": partial(torch.optim.AdamW, lr=0.01, maximize=True, foreach=True),
    "adamw_with_lr_in_a_tensor": lambda params: torch.optim.AdamW(params, torch.tensor(0.01)),
    "radam": partial(torch.optim.RAdam, lr=0.01),
    "nadam": partial(torch.optim.NAdam, lr=0.01, decoupled_weight_decay=True),
    "adafactor": partial(torch.optim.Adafactor, lr=0.05),
    "rprop": partial(torch.optim.Rprop, lr=0.01),
    "asgd": partial(torch.optim.ASGD, lr=0.05, t0=3),
    "rmsprop_centered": partial(torch.optim.RMSprop, lr=0.01, centered=True, momentum=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05, lr_decay=0.01),
    "adadelta": torch.optim.Adadelta,
    "adamax": partial(torch.optim.Adamax, lr=0.01),
}
Scheduler = Callable[[torch.optim.Optimizer], Any]
SCHEDULERS: dict[str, Scheduler] = {
    "multi_step": lambda opt: lrs.MultiStepLR(opt, [3, 6], 0.5),
    "exponential": lambda opt: lrs.ExponentialLR(opt, 0.9),
    "warm_restarts": lambda opt: lrs.CosineAnnealingWarmRestarts(opt, 4),
    "one_cycle": lambda opt: lrs.OneCycleLR(opt, 0.1, total_steps=20),
    "cyclic": lambda opt: lrs.CyclicLR(opt, 0.01, 0.1, 3),
    "warm_up_then_cosine": lambda opt: lrs.SequentialLR(
        opt, [lrs.LinearLR(opt, 0.1, total_iters=4), lrs.CosineAnnealingLR(opt, 12)], [4]
    ),
    "lambda_and_polynomial": lambda opt: lrs.ChainedScheduler(
        [lrs.LambdaLR(opt, lambda n: min(1, (n + 1) / 5)), lrs.PolynomialLR(opt, 20)]
    ),
}


def with_optimizer(make: Any, capture: Capture) -> list[Any]:
    model = mlp(6, 8, 4)
    batches = labelled(8, 6, classes=4, count=10)
    return fit(
        capture, model, lambda x, y: F.cross_entropy(model(x), y), batches, make(model.parameters())
    )


def with_scheduler(make: Scheduler, capture: Capture) -> list[Any]:
    model = mlp(6, 8, 4)
    opt = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    scheduler = make(opt)
    return fit(
        capture,
        model,
        lambda x, y: F.cross_entropy(model(x), y),
        labelled(8, 6, classes=4, count=10),
        opt,
        lambda number: scheduler.step(),
    )


for name, optimizer in OPTIMIZERS.items():
    program(name=f"optimizer_{name}")(partial(with_optimizer, optimizer))
for name, scheduler in SCHEDULERS.items():
    program(name=f"scheduler_{name}")(partial(with_scheduler, scheduler))


@program(refused="branches on values")
def optimizer_lbfgs(capture: Capture) -> list[Any]:
    model = nn.Linear(4, 1)
    opt = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)

    def step(x: Tensor) -> Any:
        def closure() -> Any:
            opt.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        return opt.step(closure).detach()  # type: ignore[no-untyped-call]

    return [*calls(capture(step), rows(8, 4)), *states(model)]


@program()
def scheduler_on_a_plateau(capture: Capture) -> list[Any]:
    model = mlp(6, 8, 1)
    opt = torch.optim.Adam(model.parameters(), 0.1)
    scheduler = lrs.ReduceLROnPlateau(opt, patience=0, factor=0.5)

    def step(x: Tensor) -> Any:
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        return loss.item()

    fast, losses = capture(step), []
    for (x,) in rows(8, 6, count=10):
        losses.append(fast(x))
        scheduler.step(losses[-1])
    return [losses, *states(model, opt)]


@program(refused="scheduler.step() in the step")
def scheduler_in_the_step(capture: Capture) -> list[Any]:
    model = mlp(6, 8, 1)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = lrs.StepLR(opt, 3)

    def step(x: Tensor) -> Any:
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        scheduler.step()
        return loss.detach()

    return [*calls(capture(step), rows(8, 6)), *states(model, opt)]


@program()
def accumulation_with_two_captured_steps(capture: Capture) -> list[Any]:
    model = mlp(6, 8, 1)
    opt = torch.optim.AdamW(model.parameters(), 0.01)

    def micro(x: Tensor) -> Any:
        loss = model(x).square().mean() / 3
        loss.backward()
        return loss.detach()

    def update() -> None:
        opt.step()
        opt.zero_grad()

    fast, last, losses = capture(micro), capture(update), []
    for number, (x,) in enumerate(rows(8, 6, count=15), 1):
        losses.append(fast(x).item())
        if number % 3 == 0:
            last()
    return [losses, *states(model, opt)]


@program()
def grad_scaler_with_an_overflow(capture: Capture) -> list[Any]:
    model = mlp(6, 8, 1)
    opt = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=3)

    def step(x: Tensor) -> Any:
        opt.zero_grad()
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt)
        scaler.update()
        return loss.detach()

    batches = rows(8, 6, count=12)
    batches[6][0][0, 0] = float("inf")
    return [*calls(capture(step), batches), *states(model, opt), scaler.get_scale()]


@fitted()
def autocast_to_bfloat16() -> Made:
    model = nn.Sequential(mlp(6, 8, 8), nn.LayerNorm(8), nn.Linear(8, 3))

    def loss(x: Tensor, y: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        return F.cross_entropy(out.float(), y)

    return (model, loss, labelled(8, 6, classes=3))


@program()
def optimizers_in_the_backward_pass(capture: Capture) -> list[Any]:
    model = mlp(6, 8, 1)
    opts = {p: torch.optim.Adam([p], 0.01) for p in model.parameters()}

    def update(p: Any) -> None:
        opts[p].step()
        opts[p].zero_grad()

    p: Any
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)

    def step(x: Tensor) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    return [*calls(capture(step), rows(8, 6)), *states(model, *opts.values())]


@program()
def ema_swapped_in_by_data(capture: Capture) -> list[Any]:
    model = mlp(6, 8, 1)
    shadow = copy.deepcopy(model)
    evaluate = capture(torch.no_grad()(lambda x: model(x).square().mean()))
    found: list[Any] = []

    def swap() -> None:
        for p, s in zip(model.parameters(), shadow.parameters(), strict=True):
            p.data, s.data = s.data, p.data

    def after(number: int) -> None:
        for p, s in zip(model.parameters(), shadow.parameters(), strict=True):
            s.data = 0.9 * s.data + 0.1 * p.data
        swap()
        found.append(evaluate(torch.ones(4, 6)).clone())
        swap()

    results = fit(capture, model, lambda x: model(x).square().mean(), rows(8, 6), after=after)
    return [results, found, *states(shadow)]
