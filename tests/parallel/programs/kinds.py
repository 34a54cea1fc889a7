"""The training programs: a model, rows, and a step of each kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.parallel.programs import models
from tests.parallel.sides import Batch, Side, clip_norm

ROWS = 24


@dataclass
class Run:
    """A program in training: models, optimizers, and whatever it keeps between steps."""

    models: list[Any]
    optimizers: list[Any]
    side: Side
    keep: dict[str, Any] = field(default_factory=dict)


@dataclass
class Program:
    """A training program.

    Attributes:
        make: The models; more than one where they have optimizers of their own.
        batch: The rows of a step, drawn with a generator.
        step: One step: its loss, averaged over the rows that it is given.
        blocks: The modules that are sharded by themselves, before the whole is.
        within: Modules in these, sharded before them.
        plan: What of it tensor parallelism cuts by columns, and what by rows.
        optimizer: The class of optimizers, and the settings.
        unused: True if a rank may leave parameters out.
        leaves_out: Beginnings of the names of ways that refuse it.
        steps: How many; the second is the first with the optimizer's state, and with what the
            ways learn in the first, such as the order of gradients.
        tolerance: How far values may be off, of the largest.
        device: The kind of device that ranks train on.
    """

    make: Callable[[], Any]
    batch: Callable[[torch.Generator], Batch]
    step: Callable[[Run, Batch], Any]
    blocks: tuple[str, ...] = ()
    within: tuple[str, ...] = ()
    plan: Mapping[str, str] = field(default_factory=dict)
    optimizer: tuple[Any, Mapping[str, Any]] = (
        torch.optim.AdamW,
        {"lr": 0.02, "weight_decay": 0.1, "eps": 1e-3},
    )
    unused: bool = False
    leaves_out: tuple[str, ...] = ()
    steps: int = 2
    tolerance: float = 1e-7
    device: str = "cpu"


def trained(loss: Callable[[Any, Batch], Any]) -> Callable[[Run, Batch], Any]:
    """The step of a program with one model."""

    def step(run: Run, batch: Batch) -> Any:
        (optimizer,) = run.optimizers
        optimizer.zero_grad()
        value = loss(run.models[0], batch)
        value.backward()
        optimizer.step()
        return value

    return step


# -- rows ----------------------------------------------------------------------------------------


def normal(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda g: torch.randn(ROWS, *shape, generator=g, dtype=torch.float64)


def integers(high: int, *shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda g: torch.randint(high, (ROWS, *shape), generator=g)


def rows(**columns: Callable[[torch.Generator], Tensor]) -> Callable[[torch.Generator], Batch]:
    return lambda g: {name: draw(g) for name, draw in columns.items()}


VECTORS = rows(x=normal(models.WIDTH), y=integers(3))
IMAGES = rows(x=normal(2, 6, 6), y=integers(3))
SERIES = rows(x=normal(5, models.WIDTH), y=integers(3))
TEXT = rows(x=integers(models.WORDS, 5))

# -- losses --------------------------------------------------------------------------------------


def classified(model: Any, batch: Batch) -> Any:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def denoised(model: Any, batch: Batch) -> Any:
    return (model(batch["x"]) - batch["x"].roll(1, 1)).square().mean()


def next_word(model: Any, batch: Batch) -> Any:
    tokens = batch["x"]
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def of_packed(model: Any, batch: Batch) -> Any:
    return F.cross_entropy(model(batch["x"], batch["lengths"] + 1), batch["y"])


def variational(model: Any, batch: Batch) -> Any:
    out, mean, log = model(batch["x"], batch["noise"])
    return (out - batch["x"]).square().mean() + 0.1 * (mean.square() + log.exp() - log).mean()


def penalised(model: Any, batch: Batch) -> Any:
    """With the gradient of the gradient with respect to the inputs."""
    x = batch["x"].clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return F.cross_entropy(out, batch["y"]) + 0.1 * slope.square().sum(-1).mean()


# -- steps ---------------------------------------------------------------------------------------


def contrasted(run: Run, batch: Batch) -> Any:
    (optimizer,) = run.optimizers
    optimizer.zero_grad()
    one, other, scale = run.models[0](batch["x"], batch["y"])
    mine = torch.arange(len(one), device=one.device) + run.side.first_row(len(one))
    value: Any = F.cross_entropy(scale * one @ run.side.all_rows(other).t(), mine)
    value.backward()
    optimizer.step()
    return value


def adversaries(run: Run, batch: Batch) -> Any:
    makes, judges = run.models
    fake = makes(batch["noise"])
    run.optimizers[1].zero_grad()
    judged: Any = F.softplus(-judges(batch["x"])).mean() + F.softplus(judges(fake.detach())).mean()
    judged.backward()
    run.optimizers[1].step()
    run.optimizers[0].zero_grad()
    value: Any = F.softplus(-judges(fake)).mean()
    value.backward()
    run.optimizers[0].step()
    return judged.detach() + value


def accumulated(run: Run, batch: Batch) -> Any:
    (optimizer,) = run.optimizers
    optimizer.zero_grad()
    total: Any = torch.zeros((), dtype=torch.float64, device=batch["x"].device)
    for part in range(2):
        piece = {name: value.chunk(2)[part] for name, value in batch.items()}
        with run.side.without_sync(run.models[0]) if part == 0 else nullcontext():
            loss = classified(run.models[0], piece) / 2
            loss.backward()
        total += loss.detach()
    norm = clip_norm(run.models[0].parameters(), 0.05)
    optimizer.step()
    return total + run.side.whole(norm).detach()


def averaged(run: Run, batch: Batch) -> Any:
    if "ema" not in run.keep:
        average = get_ema_multi_avg_fn(0.7)  # type: ignore[no-untyped-call]
        run.keep["ema"] = AveragedModel(run.models[0], multi_avg_fn=average)
    value = trained(classified)(run, batch)
    run.keep["ema"].update_parameters(run.models[0])
    with torch.no_grad():
        return value.detach() + classified(run.keep["ema"], batch)


def scheduled(run: Run, batch: Batch) -> Any:
    if "plan" not in run.keep:
        (optimizer,) = run.optimizers
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
        run.keep["plan"] = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cosine], [2])
    value = trained(classified)(run, batch)
    run.keep["plan"].step()
    return value


def cast_by_autocast(model: Any, batch: Batch) -> Any:
    with torch.autocast(batch["x"].device.type, torch.bfloat16):
        out = model(batch["x"].float())
    return F.cross_entropy(out.float(), batch["y"])


def adversarial_models() -> list[nn.Module]:
    judge = nn.Sequential(nn.Linear(models.WIDTH, 10), nn.LeakyReLU(0.2, True), nn.Linear(10, 1))
    return [nn.Sequential(nn.Linear(4, 10), nn.ReLU(True), nn.Linear(10, models.WIDTH)), judge]


_SGD = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})


def _decoders() -> dict[str, str]:
    plan = {"blocks.*.attention." + name: "columns" for name in "qkv"}
    return plan | {
        "blocks.*.attention.o": "rows",
        "blocks.*.up": "columns",
        "blocks.*.down": "rows",
    }


_MLP: dict[str, Any] = {
    "make": models.perceptron,
    "batch": VECTORS,
    "blocks": ("0", "2"),
    "within": (),
    "plan": {"0": "columns", "2": "rows"},
}
_GPT: dict[str, Any] = {
    "batch": TEXT,
    "step": trained(next_word),
    "blocks": ("blocks.0", "blocks.1"),
    "within": ("blocks.0.attention", "blocks.1.up"),
    "plan": _decoders(),
}

PROGRAMS = {
    "perceptron": Program(**_MLP, step=trained(classified)),
    "convolutions": Program(models.convolutions, IMAGES, trained(classified), ("0", "1"), ("1.1",)),
    "encoder": Program(
        models.encoder,
        rows(x=normal(5, models.WIDTH)),
        trained(denoised),
        ("layers.0", "layers.1"),
        ("layers.0.linear1", "layers.1.norm1"),
        {"layers.*.linear1": "columns", "layers.*.linear2": "rows"},
    ),
    "lstm": Program(models.Recurrent, SERIES, trained(classified), ("rnn",)),
    "gpt": Program(models.Gpt, **_GPT),
    "dense experts": Program(
        lambda: models.Experts(False), VECTORS, trained(classified), ("mixture",), ("mixture.gate",)
    ),
    "routed experts": Program(
        lambda: models.Experts(True),
        VECTORS,
        trained(classified),
        ("mixture",),
        ("mixture.gate",),
        unused=True,
    ),
    "variational": Program(
        models.Variational,
        rows(x=normal(models.WIDTH), noise=normal(4)),
        trained(variational),
        ("encode", "decode"),
        ("encode.0",),
        {"encode.0": "columns", "encode.2": "rows"},
    ),
    "contrastive": Program(
        models.TwoTowers,
        rows(x=normal(models.WIDTH), y=normal(models.WIDTH)),
        contrasted,
        ("one", "other"),
        ("one.0", "other.2"),
        {"one.0": "columns", "one.2": "rows"},
    ),
    "u-net": Program(
        models.UNet, rows(x=normal(2, 4, 4)), trained(denoised), ("down", "middle"), ("middle.0",)
    ),
    "adversaries": Program(
        adversarial_models,
        rows(x=normal(models.WIDTH), noise=normal(4)),
        adversaries,
        ("0", "2"),
        (),
        {"0": "columns", "2": "rows"},
    ),
    "packed": Program(
        lambda: models.Recurrent(True),
        rows(x=normal(5, models.WIDTH), lengths=integers(5), y=integers(3)),
        trained(of_packed),
        ("rnn",),
    ),
    "bags": Program(
        models.Bags,
        rows(x=integers(models.WORDS, 4), y=integers(3)),
        trained(classified),
        ("bags",),
        ("rows",),
    ),
    "sparse bags": Program(
        lambda: models.Bags(True),
        rows(x=integers(models.WORDS, 4), y=integers(3)),
        trained(classified),
        ("bags",),
        optimizer=(torch.optim.SGD, {"lr": 0.1}),
        leaves_out=("shards", "distributed"),
    ),
    "residual": Program(
        models.residual_net, IMAGES, trained(classified), ("0", "1", "2"), ("1.conv1", "2.bn2")
    ),
    "tied": Program(lambda: models.Gpt(True), **_GPT),
    "accumulated": Program(**_MLP, step=accumulated, optimizer=_SGD),
    "averaged": Program(**_MLP, step=averaged, steps=3),
    "scheduled": Program(**_MLP, step=scheduled, optimizer=_SGD, steps=4),
    "autocast": Program(
        **_MLP | {"make": lambda: models.perceptron().float()},
        step=trained(cast_by_autocast),
        optimizer=_SGD,
        tolerance=0.03,
    ),
    "penalised": Program(**_MLP, step=trained(penalised)),
    "adapted": Program(
        models.adapted,
        VECTORS,
        trained(classified),
        ("0", "2", "3"),
        ("0.base", "3.a"),
        {"0.base": "gathered", "0.b": "gathered", "3.a": "gathered"},
    ),
}
