"""What steps are given and give, and where they find their models: objects, numbers, classes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.capture.ordinary.data import labelled, mlp, rows
from tests.capture.ordinary.running import Capture, Made, calls, fit, fitted, program, states


@dataclass
class Batch:
    x: Tensor
    y: Tensor
    weight: float = 1.0


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def of_batches(wrap: Any, loss: Any, capture: Capture) -> list[Any]:
    """Training on batches that are new objects in each call."""
    model = mlp(6, 8, 3)
    batches = [(wrap(x, y),) for x, y in labelled(8, 6, classes=3, count=12)]
    return fit(capture, model, partial(loss, model), batches)


BATCHES: dict[str, tuple[Any, Any]] = {
    "dataclass": (Batch, lambda m, b: F.cross_entropy(m(b.x), b.y) * b.weight),
    "dict": (lambda x, y: {"x": x, "y": y}, lambda m, b: F.cross_entropy(m(b["x"]), b["y"])),
    "namedtuple": (Pair, lambda m, b: F.cross_entropy(m(b.x), b.y)),
    "nested_dict_with_texts": (
        lambda x, y: {"meta": {"split": "train", "ids": [1, 2]}, "data": [x, {"y": y}]},
        lambda m, b: F.cross_entropy(m(b["data"][0]), b["data"][1]["y"]),
    ),
    "numpy_arrays": (
        lambda x, y: (x.numpy(), y.numpy()),
        lambda m, b: F.cross_entropy(m(torch.from_numpy(b[0])), torch.from_numpy(b[1])),
    ),
}
for name, (wrap, loss) in BATCHES.items():
    refused = "arrays become tensors in the step" if name == "numpy_arrays" else ""
    program(name=f"batch_in_a_{name}", refused=refused)(partial(of_batches, wrap, loss))


class Config:
    def __init__(self, smoothing: float) -> None:
        self.smoothing, self.kinds = smoothing, ("train", "ce")


@fitted()
def a_new_object_of_equal_content_in_each_call() -> Made:
    model = mlp(6, 8, 3)

    def loss(x: Tensor, y: Tensor, config: Config) -> Any:
        return F.cross_entropy(model(x), y, label_smoothing=config.smoothing)

    batches = [(x, y, Config(0.1)) for x, y in labelled(8, 6, classes=3, count=12)]
    return (model, loss, batches)


def with_number(number: Any, capture: Capture) -> list[Any]:
    """A number that differs in each call, as an argument, scales the loss."""
    model = mlp(6, 8, 3)
    batches = [(x, y, number(i)) for i, (x, y) in enumerate(labelled(8, 6, classes=3, count=14))]
    return fit(capture, model, lambda x, y, n: F.cross_entropy(model(x) / n, y), batches)


NUMBERS: dict[str, Any] = {
    "warm_up_factor": lambda i: min(1.0, (i + 1) / 10),
    "temperature_of_numpy": lambda i: np.float32(2.0 * 0.95**i),
    "count_of_steps": lambda i: i + 1,
    "tensor_of_a_number": lambda i: torch.tensor(1.0 + i),
}
for name, number in NUMBERS.items():
    program(name=f"number_{name}")(partial(with_number, number))


@fitted()
def learning_rate_of_numpy_set_by_hand() -> Made:
    model = mlp(6, 8, 1)
    opt = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    rates = np.geomspace(0.1, 0.01, 14).astype(np.float32)

    def after(number: int) -> None:
        for group in opt.param_groups:
            group["lr"] = rates[number]

    return (model, lambda x: model(x).square().mean(), rows(8, 6), opt, after)


@fitted()
def annealed_weight_of_a_loss_in_an_attribute() -> Made:
    model = mlp(6, 8, 6)
    config = Config(0.0)

    def loss(x: Tensor) -> Any:
        out = model(x)
        return F.mse_loss(out, x) + config.smoothing * out.abs().mean()

    def after(number: int) -> None:
        config.smoothing = 0.01 * number

    return (model, loss, rows(8, 6, count=14), None, after)


class Trainer:
    def __init__(self, capture: Capture) -> None:
        self.model = mlp(6, 8, 3)
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.01)
        self.criterion, self.config = nn.CrossEntropyLoss(), {"clip": 1.0, "log": False}
        self.train_step = capture(self._train_step)

    def _train_step(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        self.optimizer.zero_grad()
        logits = self.model(x)
        loss = self.criterion(logits, y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config["clip"])
        self.optimizer.step()
        return {"loss": loss.detach(), "accuracy": (logits.argmax(-1) == y).float().mean()}


@program()
def a_class_of_a_trainer(capture: Capture) -> list[Any]:
    trainer = Trainer(capture)
    batches = labelled(8, 6, classes=3)
    return [*calls(trainer.train_step, batches), *states(trainer.model, trainer.optimizer)]


MODEL: Any = None
OPTIMIZER: Any = None


def global_step(x: Tensor) -> Any:
    OPTIMIZER.zero_grad()
    loss = MODEL(x).square().mean()
    loss.backward()
    OPTIMIZER.step()
    return loss  # as most loops give it: the graph is freed, and .item() follows


@program()
def models_in_globals(capture: Capture) -> list[Any]:
    global MODEL, OPTIMIZER
    MODEL = mlp(6, 8, 1)
    OPTIMIZER = torch.optim.Adagrad(MODEL.parameters(), 0.1)
    return [*calls(capture(global_step), rows(8, 6)), *states(MODEL, OPTIMIZER)]


@program()
def metrics_in_tensors(capture: Capture) -> list[Any]:
    model = mlp(6, 8, 3)
    confusion, total = torch.zeros(3, 3, dtype=torch.long), torch.zeros(())

    @torch.no_grad()
    def evaluate(x: Tensor, y: Tensor) -> None:
        guess = model(x).argmax(-1)
        confusion.index_put_((y, guess), torch.ones_like(y), accumulate=True)
        total.add_((guess == y).float().mean())

    return [*calls(capture(evaluate), labelled(8, 6, classes=3)), *states(confusion, total)]


class Meter:
    def __init__(self) -> None:
        self.loss, self.last = torch.zeros(()), torch.zeros(3)

    def update(self, loss: Tensor, out: Tensor) -> None:
        self.loss = 0.9 * self.loss + 0.1 * loss.detach()
        self.last = out.detach().mean(0)


@program()
def metrics_in_new_tensors_of_an_object(capture: Capture) -> list[Any]:
    model, meter = mlp(6, 8, 3), Meter()

    def loss(x: Tensor) -> Any:
        out = model(x)
        value = out.square().mean()
        meter.update(value, out)
        return value

    return [*fit(capture, model, loss, rows(8, 6)), *states(meter.loss, meter.last)]


@program()
def views_shared_between_arguments(capture: Capture) -> list[Any]:
    model = mlp(6, 8, 1)

    def step(x: Tensor, y: Tensor) -> Any:
        x.mul_(0.5)
        return (model(x).sum() + y.sum()).detach(), y + 1

    whole = [torch.randn(8, 6) for _ in range(12)]
    pairs = [(w, w[0] if i % 3 else torch.ones(6)) for i, w in enumerate(whole)]
    return [*calls(capture(step), pairs), *states(*whole)]


@fitted()
def a_loader_with_an_odd_last_batch() -> Made:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    data = torch.utils.data.TensorDataset(torch.randn(22, 6), torch.randint(3, (22,)))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)

    def batches() -> Iterator[Any]:
        for _ in range(4):
            yield from loader

    return (model, lambda x, y: F.cross_entropy(model(x), y), batches())


@program(refused="a result with a graph")
def an_encoder_with_head_and_loss_outside(capture: Capture) -> list[Any]:
    encoder, head = mlp(6, 8), nn.Linear(8, 2)
    opt = torch.optim.SGD([*encoder.parameters(), *head.parameters()], 0.1)
    fast = capture(lambda x: encoder(x).relu())
    for (x,) in rows(8, 6):
        opt.zero_grad()
        head(fast(x)).square().mean().backward()
        opt.step()
    return states(encoder, head)


@program()
def a_step_left_out_where_the_loss_is_not_finite(capture: Capture) -> list[Any]:
    model = mlp(6, 8, 1)
    opt = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor) -> Any:
        loss = model(x).square().mean()
        if not torch.isfinite(loss):
            return None
        opt.zero_grad()
        loss.backward()
        opt.step()
        return loss.detach()

    return [*calls(capture(step), rows(8, 6)), *states(model)]
