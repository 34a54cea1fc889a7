"""What a loop does between the calls of captured steps: it freezes, loads, evaluates, resets."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.nn import functional as F

from tests.capture.ordinary.data import labelled, mlp, rows, tokens
from tests.capture.ordinary.models import LanguageModel, Lora, lora_model
from tests.capture.ordinary.running import Capture, Made, calls, fit, fitted, program, states


class Loop:
    """A model in training, and what changes between the calls."""

    def __init__(self) -> None:
        self.model: Any = nn.Sequential(mlp(6, 8, 8), nn.Dropout(0.2), nn.BatchNorm1d(8), mlp(8, 3))
        self.opt = torch.optim.Adam(self.model.parameters(), 0.01)
        self.best: Any = self.saved()

    def saved(self) -> Any:
        return copy.deepcopy((self.model.state_dict(), self.opt.state_dict()))

    def run(self, capture: Capture, after: Callable[[Loop, int], None]) -> list[Any]:
        def loss(x: Tensor, y: Tensor) -> Any:
            return F.cross_entropy(self.model(x), y)

        batches = labelled(8, 6, classes=3, count=14)
        return fit(capture, self.model, loss, batches, self.opt, lambda n: after(self, n))


def freeze(loop: Loop, number: int) -> None:
    if number in (4, 9):
        loop.model[0].requires_grad_(number == 9)


def freeze_batch_norm(loop: Loop, number: int) -> None:
    if number == 6:
        loop.model[2].eval()


def evaluate(loop: Loop, number: int) -> None:
    if number % 4 == 0:
        loop.model.eval()
        with torch.no_grad():
            loop.best = loop.model(torch.ones(5, 6)).sum()
        loop.model.train()


def load_model(loop: Loop, number: int) -> None:
    if number == 3:
        loop.best = loop.saved()
    if number in (7, 9, 11):
        loop.model.load_state_dict(loop.best[0])


def load_both_many_times(loop: Loop, number: int) -> None:
    if number > 2:
        loop.opt.load_state_dict(loop.best[1] if number % 2 and number > 3 else loop.saved()[1])
        loop.best = loop.saved()


def load_by_assignment(loop: Loop, number: int) -> None:
    if number in (5, 8):
        loop.model.load_state_dict(loop.saved()[0], assign=True)
        loop.opt.param_groups[0]["params"] = list(loop.model.parameters())
        loop.opt.state.clear()


def reset_the_optimizer(loop: Loop, number: int) -> None:
    if number == 6:
        loop.opt.state.clear()


def change_dropout(loop: Loop, number: int) -> None:
    if number % 5 == 0:
        loop.model[1].p = 0.1 * number / 5


def initialize_a_head_again(loop: Loop, number: int) -> None:
    if number == 6:
        nn.init.trunc_normal_(loop.model[3][0].weight, std=0.02)


def unfreeze_with_a_new_group(loop: Loop, number: int) -> None:
    if number == 1:
        loop.opt.param_groups[0]["params"] = list(loop.model[3].parameters())
    if number == 7:
        rest = [*loop.model[0].parameters(), *loop.model[2].parameters()]
        loop.opt.add_param_group({"params": rest, "lr": 0.001})


def prune(loop: Loop, number: int) -> None:
    if number == 6:
        nn.utils.prune.l1_unstructured(loop.model[0][0], "weight", 0.5)  # type: ignore[no-untyped-call]


def noise_on_weights(loop: Loop, number: int) -> None:
    with torch.no_grad():
        for p in loop.model.parameters():
            p.add_(torch.randn_like(p), alpha=1e-3)


def new_data_of_weights(loop: Loop, number: int) -> None:
    for p in loop.model.parameters():
        p.data = p.data * 0.99


CHANGES = [
    freeze, freeze_batch_norm, evaluate, load_model, load_both_many_times, load_by_assignment,
    reset_the_optimizer, change_dropout, initialize_a_head_again,
    unfreeze_with_a_new_group, prune, noise_on_weights, new_data_of_weights,
]  # fmt: skip
for change in CHANGES:
    program(name=f"between_{change.__name__}")(
        partial(lambda change, capture: Loop().run(capture, change), change)
    )


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model, self.h = LanguageModel(nn.GRU), None

    def forward(self, ids: Tensor) -> Any:
        logits, h = self.model(ids, self.h)
        self.h = h.detach()
        return logits


@program()
def a_state_in_an_attribute_set_to_none(capture: Capture) -> list[Any]:
    model = Stateful()

    def after(number: int) -> None:
        if number % 5 == 0:
            model.h = None

    def loss(ids: Tensor) -> Any:
        return F.cross_entropy(model(ids)[:, -1], ids[:, 0])

    batches = tokens(4, 7, size=12, count=14)
    return [*fit(capture, model, loss, batches, None, after), *states(model.h)]


@program()
def lora_merged_for_evaluation(capture: Capture) -> list[Any]:
    model = lora_model()
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01)
    evaluate, seen = capture(torch.no_grad()(lambda x: model(x).sum(0))), []
    layers = [layer for layer in model if isinstance(layer, Lora)]

    def after(number: int) -> None:
        for layer in layers:
            layer.merge()
        seen.append(evaluate(torch.ones(4, 6)).clone())
        for layer in layers:
            layer.merge(-1)

    batches = labelled(8, 6, classes=4)
    return [
        *fit(capture, model, lambda x, y: F.cross_entropy(model(x), y), batches, opt, after),
        seen,
    ]


@program()
def a_weight_replaced_by_one_of_another_size(capture: Capture) -> list[Any]:
    model = mlp(6, 8, 3)
    step = capture(torch.no_grad()(lambda x: model(x).mean(0)))
    seen = []
    for number, (x,) in enumerate(rows(8, 6, count=12)):
        if number == 6:
            model[0], model[2] = nn.Linear(6, 10), nn.Linear(10, 3)
        seen.append(step(x).clone())
    return seen


@program()
def random_masks_from_a_generator(capture: Capture) -> list[Any]:
    model, generator = mlp(6, 8, 3), torch.Generator().manual_seed(3)

    def loss(x: Tensor) -> Any:
        mask = torch.rand(x.shape, generator=generator) > 0.3
        return model(x.masked_fill(mask, 0.0)).square().mean()

    results = fit(capture, model, loss, rows(8, 6))
    return [results, torch.rand(3, generator=generator)]


@fitted()
def compiled_model() -> Made:
    model = mlp(6, 8, 3)
    fast = torch.compile(model, backend="aot_eager")
    return (model, lambda x, y: F.cross_entropy(fast(x), y), labelled(8, 6, classes=3))


@fitted()
def compiled_loss() -> Made:
    model = mlp(6, 8, 3)
    loss = torch.compile(lambda x: model(x).square().mean(), fullgraph=True, backend="aot_eager")
    return (model, loss, [(torch.randn(n, 6),) for n in (8, 8, 8, 6, 8, 4, 9, 6)])


def evaluated(capture: Capture, mode: Any) -> list[Any]:
    model = nn.Sequential(mlp(6, 8, 8), nn.Dropout(0.2), nn.BatchNorm1d(8)).eval()
    step = capture(lambda x: torch.softmax(model(x), -1).topk(2))
    with mode():
        return calls(step, [(torch.randn(n, 6),) for n in (4, 4, 4, 1, 7, 2, 9, 1, 4)])


program(name="inference_in_no_grad")(partial(evaluated, mode=torch.no_grad))
program(name="inference_in_inference_mode")(partial(evaluated, mode=torch.inference_mode))
