"""Learn to read handwritten digits on several ranks, each of which has another number of images.

    tilework run -n 4 examples/digits.py     # with 1, 2 and 4 ranks, one after the other
    python examples/digits.py --check        # the script launches itself; compares with one process

The images are the 1,797 that come with scikit-learn. A small convolutional network is trained with
one rank, with two, and so on up to all of them; the picture that is drawn at the end shows the
accuracy against the steps. Three things make it data-parallel:

- ``SyncBatchNorm`` normalises with the mean and variance of all ranks' rows;
- ``DistributedDataParallel`` averages gradients during backward;
- ``with model.join():`` lets ranks that have run out of images wait for those that have not.

``--check`` trains on one process, where a step's rows are those of all ranks, and compares losses:
in double precision, as training amplifies what rounding does to sums in another order.
The last line that rank 0 prints is one JSON object with the results.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch
from common import Parser, launch_myself, ranks_asked, whole_number
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import tilework.distributed as dist
from tilework.parallel import DistributedDataParallel, SyncBatchNorm

#: What this example needs beyond tilework, by the names to import and to install.
NEEDED = {"sklearn": "scikit-learn", "matplotlib": "matplotlib"}
TEST_IMAGES = 360
#: For a batch of 16; in proportion for larger ones.
LEARNING_RATE = 0.02
GOOD = 0.95


# --- what the user can ask for ---------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """The flags, checked."""

    ranks: int
    epochs: int
    batch: int
    seed: int
    plot: Path
    check: bool

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in."""
        return torch.float64 if self.check else torch.float32


def make_parser() -> Parser:
    """Every flag, with its default."""
    parser = Parser(description="Train a classifier of digits with SyncBatchNorm, DDP and join.")
    count = whole_number(1)
    add = parser.add_argument
    add("--ranks", type=count, help="processes: trains with 1, 2, 4, … of them (default: 4)")
    add("--epochs", type=count, default=2, help="times that each image is seen (%(default)s)")
    add("--batch", type=count, default=16, help="images of a rank in a step (%(default)s)")
    add("--seed", type=whole_number(0), default=0, help="of all random numbers (%(default)s)")
    add("--plot", type=Path, default=Path("digits.svg"), help=".svg or .png file (%(default)s)")
    add("--check", action="store_true", help="train again on one process and compare the losses")
    return parser


def parse_options(parser: Parser) -> Options:
    """Read the command line; end the program with one clear message where it is wrong."""
    given = parser.parse_args()
    given.ranks = ranks_asked(parser, given.ranks) or 4
    most = (1797 - TEST_IMAGES) // (4 * given.batch)
    if given.ranks > max(1, most):
        parser.error(
            f"--ranks {given.ranks} with --batch {given.batch}: there are images for a few batches "
            f"of {max(1, most)} ranks only"
        )
    if given.plot.suffix not in (".svg", ".png"):
        parser.error(f"--plot {given.plot}: the name of a picture ends in .svg or .png")
    if not given.plot.absolute().parent.is_dir():
        parser.error(f"--plot {given.plot}: there is no folder {given.plot.absolute().parent}")
    missing = [name for module, name in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        parser.error(
            f"this example needs {' and '.join(missing)}: {sys.executable} -m pip install "
            f"{' '.join(missing)}"
        )
    return Options(**vars(given))


# --- the images --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Digits:
    """Images of (n, 1, 8, 8) numbers from 0 to 1, and the digits that they show."""

    images: Tensor
    labels: Tensor


def load_digits(options: Options) -> tuple[Digits, Digits]:
    """Images to learn from, and others to test with."""
    from sklearn import datasets  # type: ignore[import-untyped]

    found = datasets.load_digits()
    images = torch.tensor(found.images, dtype=options.dtype).unsqueeze(1) / 16
    labels = torch.tensor(found.target, dtype=torch.long)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(options.seed))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return Digits(images[train], labels[train]), Digits(images[test], labels[test])


def shared_digits(options: Options) -> list[Digits]:
    """Both sets on every rank, of which only rank 0 has to load scikit-learn. Collective."""
    box = [load_digits(options) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    (pair,) = box
    assert pair is not None
    return [*pair]


def own_images(count: int, ranks: int) -> list[Tensor]:
    """The numbers of the images of each rank: for four ranks in the proportion 8 : 7 : 6 : 5."""
    parts = torch.arange(2 * ranks, ranks, -1).cumsum(0)
    ends = (parts[:-1] * count // parts[-1]).tolist()
    return [*torch.arange(count).tensor_split(ends)]


def batches_of(own: Tensor, epoch: int, options: Options) -> tuple[Tensor, ...]:
    """A rank's images in the order of an epoch, in batches."""
    generator = torch.Generator().manual_seed(options.seed * 1000 + epoch)
    order = torch.randperm(len(own), generator=generator)
    return torch.split(own[order], options.batch)


# --- the model ---------------------------------------------------------------------------------


def build(options: Options) -> nn.Sequential:
    """A network with the same weights for the same seed: (n, 1, 8, 8) images to (n, 10) scores."""
    torch.manual_seed(options.seed)

    def layer(before: int, after: int) -> list[nn.Module]:
        convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(after), nn.ReLU()]

    features = [*layer(1, 16), *layer(16, 32), nn.MaxPool2d(2), *layer(32, 32)]
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(32 * 4 * 4, 10)).to(options.dtype)


@torch.inference_mode()
def accuracy(model: nn.Module, test: Digits) -> float:
    """The share of the test images that are read right. Local: it uses the running statistics."""
    model.eval()
    right = model(test.images).argmax(1) == test.labels
    model.train()
    return float(right.float().mean())


# --- training ----------------------------------------------------------------------------------


@dataclass
class Curve:
    """What training with some ranks gave."""

    ranks: int
    losses: list[float]  # of each step, over all ranks' rows
    accuracies: list[float]  # after each step
    images: list[int]  # of each rank
    seconds: float

    @property
    def steps_to_good(self) -> int | None:
        """The first step after which GOOD of the test images are read right."""
        return next((i for i, a in enumerate(self.accuracies, 1) if a >= GOOD), None)


def train(
    data: Digits, test: Digits, options: Options, group: dist.ProcessGroup
) -> tuple[Curve, nn.Module]:
    """Train with the ranks of a group. Collective over the group."""
    rank, ranks = group.rank(), group.size()
    shares = own_images(len(data.labels), ranks)
    model = SyncBatchNorm.convert_sync_batchnorm(build(options), group)
    ddp = DistributedDataParallel(model, process_group=group)
    # No momentum: a rank that has run out of images takes no steps, and would keep an old one.
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LEARNING_RATE * ranks)
    losses: list[Tensor] = []
    accuracies: list[float] = []
    begun = time.perf_counter()
    for epoch in range(options.epochs):
        with ddp.join():
            for rows in batches_of(shares[rank], epoch, options):
                optimizer.zero_grad()
                loss = F.cross_entropy(ddp(data.images[rows]), data.labels[rows], reduction="sum")
                # DDP divides by the ranks: this is the sum over all rows by those of a full step.
                (loss / options.batch).backward()
                optimizer.step()
                losses.append(loss.detach() / (options.batch * ranks))
                if rank == 0:  # it has the most images
                    accuracies.append(accuracy(model, test))
            steps = len(batches_of(shares[0], epoch, options))
            losses += [torch.zeros((), dtype=options.dtype)] * (steps * (epoch + 1) - len(losses))
    seconds = time.perf_counter() - begun
    total = torch.stack(losses)
    dist.all_reduce(total, group=group)
    sizes = [len(share) for share in shares]
    return Curve(ranks, total.tolist(), accuracies, sizes, seconds), model


def train_alone(data: Digits, options: Options, ranks: int) -> Iterator[float]:
    """The losses of one process that takes all ranks' rows in each step."""
    shares = own_images(len(data.labels), ranks)
    model = build(options)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE * ranks)
    for epoch in range(options.epochs):
        batches = [batches_of(share, epoch, options) for share in shares]
        for parts in zip_longest(*batches, fillvalue=torch.tensor([], dtype=torch.long)):
            rows = torch.cat(parts)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data.images[rows]), data.labels[rows], reduction="sum")
            (loss / (options.batch * ranks)).backward()
            optimizer.step()
            yield loss.item() / (options.batch * ranks)


# --- what the user sees ------------------------------------------------------------------------


def table_of(curves: list[Curve]) -> Table:
    """A table of what training gave."""
    table = Table(title="handwritten digits: the same epochs with more ranks")
    for name in ("ranks", "images of each", "steps", f"steps to {GOOD:.0%}", "seconds", "accuracy"):
        table.add_column(name, justify="right")
    for curve in curves:
        table.add_row(
            str(curve.ranks),
            " ".join(map(str, curve.images)),
            str(len(curve.losses)),
            str(curve.steps_to_good or ""),
            f"{curve.seconds:.1f}",
            f"{curve.accuracies[-1]:.1%}",
        )
    return table


def draw(curves: list[Curve], options: Options) -> None:
    """Write the picture of accuracy against steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for curve, colour in zip(curves, ("#4b5563", "#2563eb", "#d97706", "#059669"), strict=False):
        steps = range(1, len(curve.accuracies) + 1)
        percent = [100 * a for a in curve.accuracies]
        label = f"{curve.ranks} rank{'s' * (curve.ranks > 1)}"
        axes.plot(steps, percent, color=colour, label=f"{label}: {percent[-1]:.1f} %")
        axes.plot(steps[-1], percent[-1], "o", color=colour)
    axes.set(xlabel="step", ylabel="test images read right (%)", ylim=(0, 101))
    axes.set_xlim(left=0)
    axes.set_title(
        f"{options.epochs} epochs of handwritten digits, {options.batch} images of a rank in a step"
    )
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", title="after the last step")
    figure.savefig(options.plot, dpi=120)


def report(curves: list[Curve], data: Digits, options: Options) -> None:
    """On rank 0, when the others are done: table, picture, check, and the last line."""
    Console().print(table_of(curves))
    draw(curves, options)
    print(f"accuracy against steps: {options.plot}")
    results: dict[str, object] = {
        "ranks": [curve.ranks for curve in curves],
        "steps": [len(curve.losses) for curve in curves],
        "accuracy": [round(curve.accuracies[-1], 4) for curve in curves],
        "steps_to_good": [curve.steps_to_good for curve in curves],
        "plot": str(options.plot),
    }
    if options.check:
        apart = [
            [
                abs(a - b) / max(b, 1e-12)
                for a, b in zip(curve.losses, train_alone(data, options, curve.ranks), strict=True)
            ]
            for curve in curves
        ]
        results["max_rel_diff"] = max(map(max, apart))
    print(json.dumps(results), flush=True)


def sizes_up_to(ranks: int) -> list[int]:
    """1, 2, 4, … and all of them."""
    powers = [1 << i for i in range(ranks.bit_length()) if 1 << i < ranks]
    return [*powers, ranks]


def main() -> None:
    """What each rank runs, and what starts the ranks."""
    options = parse_options(make_parser())
    if "RANK" not in os.environ:
        launch_myself(options.ranks)
    dist.init_process_group()
    rank = dist.get_rank()
    data, test = shared_digits(options)
    curves = []
    for ranks in sizes_up_to(options.ranks):
        group = dist.new_group(list(range(ranks)))  # every rank must call it
        if rank < ranks:
            assert isinstance(group, dist.ProcessGroup)
            curve, _ = train(data, test, options, group)
            curves.append(curve)
        if rank == 0:
            print(
                f"{ranks} rank{'s' * (ranks > 1)}: {len(curve.losses)} steps, "
                f"{curve.accuracies[-1]:.1%} of the test images read right",
                flush=True,
            )
    dist.destroy_process_group()
    if rank == 0:
        report(curves, data, options)


if __name__ == "__main__":
    main()
