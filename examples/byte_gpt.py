"""Train a small GPT on bytes, on several processes, with tilework.

    tilework run -n 2 examples/byte_gpt.py          # two ranks
    python examples/byte_gpt.py --ranks 2           # the same: the script launches itself
    python examples/byte_gpt.py --text my_book.txt  # your own text: a file or a folder

Data parallelism in one paragraph: every rank holds the whole model and starts from the same
weights. In each step all ranks draw the same global batch of byte sequences, and each takes its
share of the rows. Gradients are then averaged over the ranks, so that every rank takes exactly
the step that one process would take on the whole batch. ``--check`` proves that: it trains the
same batches again on one process and compares the losses.

The text is Python's own standard library, so there is nothing to download. The last line that
rank 0 prints is one JSON object with the results.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn import functional as F

import tilework.distributed as dist
from tilework.launch.cores import usable_cores

VOCABULARY = 256  # one token per byte value
HEAD_WIDTH = 32
BUCKET_BYTES = 1 << 20
PEAK_LEARNING_RATE = 3e-3
PROMPT = "def "
#: Not Python that people write: other packages, tests, long tables.
STDLIB_SKIPPED = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data")
)


# --- what the user can ask for ---------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    """Reports a wrong flag once, not once per rank."""

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") != "0":
            raise SystemExit(2)
        super().error(message)


def whole_number(least: int) -> Callable[[str], int]:
    """A parser of whole numbers from ``least`` on that fit into 63 bits, as seeds must."""

    def parse(text: str) -> int:
        if not text.strip().isdecimal() or not least <= int(text) < 1 << 63:
            raise argparse.ArgumentTypeError(
                f"expected a whole number of at least {least}, got {text!r}"
            )
        return int(text)

    return parse


@dataclass(frozen=True)
class Options:
    """The flags, checked."""

    steps: int
    ranks: int
    seed: int
    batch: int
    context: int
    width: int
    layers: int
    text: Path | None
    check: bool


def make_parser() -> Parser:
    """Every flag, with its default."""
    parser = Parser(description="Train a small GPT on bytes, data-parallel, with tilework.")
    count = whole_number(1)
    add = parser.add_argument
    add("--steps", type=count, default=1100, help="training steps (default: %(default)s)")
    add("--ranks", type=count, help="processes (default: one for each core)")
    add("--seed", type=whole_number(0), default=0, help="of all random numbers (%(default)s)")
    add("--batch", type=count, default=32, help="sequences in a step, all ranks (%(default)s)")
    add("--context", type=count, default=64, help="bytes in a sequence (%(default)s)")
    add("--width", type=count, default=128, help="numbers that stand for a byte (%(default)s)")
    add("--layers", type=count, default=3, help="blocks, one on another (%(default)s)")
    add("--text", type=Path, help="a file or folder to train on (default: Python's own library)")
    add("--check", action="store_true", help="train again on one process and compare the losses")
    return parser


def parse_options(parser: Parser) -> Options:
    """Read the command line; end the program with one clear message where it is wrong."""
    given = parser.parse_args()
    launched = os.environ.get("WORLD_SIZE")
    if launched is not None and given.ranks not in (None, int(launched)):
        parser.error(
            f"--ranks {given.ranks}, but the launcher started {launched}: "
            "leave --ranks out, or tell the launcher"
        )
    if given.ranks is None:
        given.ranks = int(launched) if launched else min(usable_cores(), given.batch)
    if given.batch < given.ranks:
        parser.error(
            f"--batch {given.batch} is less than one sequence for each of {given.ranks} ranks: "
            f"use --batch {given.ranks} or more, or fewer ranks"
        )
    if given.width % HEAD_WIDTH:
        parser.error(f"--width {given.width} is not a multiple of {HEAD_WIDTH}")
    return Options(**vars(given))


# --- the text ----------------------------------------------------------------------------------


def text_files(root: Path | None) -> list[Path]:
    """The files to train on, in the same order everywhere."""
    if root is not None and root.is_file():
        return [root]
    folder = root or Path(sysconfig.get_path("stdlib"))
    found = []
    for path in sorted(folder.rglob("*" if root else "*.py")):
        parts = path.relative_to(folder).parts
        unwanted = STDLIB_SKIPPED.intersection(parts) if root is None else hidden(parts)
        if path.is_file() and not unwanted:
            found.append(path)
    return found


def hidden(parts: tuple[str, ...]) -> bool:
    """Whether a path leads through a name like ``.git``."""
    return any(part.startswith(".") for part in parts)


def load_text(options: Options) -> Tensor:
    """All bytes of the text as one uint8 tensor. Raises ValueError where there are too few."""
    root = options.text
    if root is not None and not root.exists():
        raise ValueError(f"--text {root}: no such file or folder")
    try:
        data = b"\n".join(path.read_bytes() for path in text_files(root))
    except OSError as error:
        raise ValueError(f"--text {root}: cannot be read: {error.strerror}") from None
    where = f"--text {root}" if root else "the standard library's sources"
    if not data.strip():
        raise ValueError(f"{where}: there is no text in it")
    needed = options.context + 1
    if len(data) < needed:
        raise ValueError(
            f"{where}: {len(data)} bytes are too few for --context {options.context}; "
            f"at least {needed} are needed"
        )
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def batches(text: Tensor, options: Options) -> Iterator[Tensor]:
    """Global batches: (batch, context + 1) token numbers, the same on every rank."""
    generator = torch.Generator().manual_seed(options.seed)
    window = torch.arange(options.context + 1)
    for _ in range(options.steps):
        starts = torch.randint(len(text) - options.context, (options.batch, 1), generator=generator)
        yield text[starts + window].long()


# --- the model ---------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention to earlier bytes, then a small network on each byte; both add to the stream."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // HEAD_WIDTH
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (batch, heads, time, width)
            for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attended(mixed.transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return x


class ByteGPT(nn.Module):
    """(batch, time) bytes to (batch, time, 256) logits of the byte that follows each."""

    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What adds to the stream starts smaller, so that depth does not make it grow.
                adds = name.endswith(("attended.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if adds else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.byte(tokens) + self.position[: tokens.shape[1]]
        # The table that turns bytes into vectors also scores them (tied weights).
        return F.linear(self.norm(self.blocks(x)), self.byte.weight)


def loss_of(model: ByteGPT, rows: Tensor) -> Tensor:
    """Mean cross-entropy, in nats for a byte, of predicting each byte from those before it."""
    logits: Tensor = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


# --- data parallelism --------------------------------------------------------------------------


def rows_of(batch: Tensor, rank: int, ranks: int) -> tuple[Tensor, float]:
    """This rank's rows of a batch, and the weight that makes the average over ranks exact.

    32 rows over 3 ranks are 11 + 11 + 10: a mean of three means would count the last rows too
    much, so each rank's mean is scaled by its part of the rows.
    """
    rows = batch.tensor_split(ranks)[rank]
    return rows, len(rows) * ranks / len(batch)


class GradientBuckets:
    """Averages gradients over the ranks while backward is still at work on earlier layers.

    One large message is much cheaper than many small ones. So the gradients live side by side
    in a few flat buffers, and each is sent off as soon as backward has filled it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.flats: list[Tensor] = []
        self.missing: list[int] = []  # gradients that each bucket still waits for
        self.sizes: list[int] = []
        self.works: list[dist.Work] = []
        self.seconds = 0.0  # spent in communication calls and in waiting for them
        # Backward meets the last layer first: buckets are filled in that order.
        bucket: list[nn.Parameter] = []
        for parameter in reversed(list(model.parameters())):
            bucket.append(parameter)
            if sum(p.nbytes for p in bucket) >= BUCKET_BYTES:
                self._add_bucket(bucket)
                bucket = []
        if bucket:
            self._add_bucket(bucket)

    def _add_bucket(self, parameters: list[nn.Parameter]) -> None:
        sizes = [p.numel() for p in parameters]
        flat = torch.zeros(sum(sizes))
        index = len(self.flats)
        for parameter, part in zip(parameters, flat.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)  # backward adds into the bucket in place
            parameter.register_post_accumulate_grad_hook(lambda _: self._arrived(index))
        self.flats.append(flat)
        self.sizes.append(len(parameters))

    def start(self) -> None:
        """Before backward: empty the buckets."""
        for flat in self.flats:
            flat.zero_()
        self.missing = list(self.sizes)
        self.works.clear()

    def _arrived(self, index: int) -> None:
        self.missing[index] -= 1
        # Every rank must send the buckets in the same order, so a full one waits its turn.
        while len(self.works) < len(self.flats) and self.missing[len(self.works)] == 0:
            self._send(self.flats[len(self.works)])

    def _send(self, tensor: Tensor) -> None:
        begun = time.perf_counter()
        work = dist.all_reduce(tensor, op=dist.ReduceOp.AVG, async_op=True)
        assert work is not None  # as it is with async_op
        self.works.append(work)
        self.seconds += time.perf_counter() - begun

    def finish(self, loss: Tensor) -> None:
        """After backward: average the loss too, and wait until everything is averaged."""
        self._send(loss)
        begun = time.perf_counter()
        for work in self.works:
            work.wait()
        self.seconds += time.perf_counter() - begun


def build(options: Options) -> tuple[ByteGPT, torch.optim.Optimizer]:
    """The model and its optimizer, the same for the same seed."""
    torch.manual_seed(options.seed)
    model = ByteGPT(options.width, options.layers, options.context)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), fused=True
    )
    return model, optimizer


def learning_rate(step: int, steps: int) -> float:
    """Up in a straight line for the first twentieth, then down along a cosine to a tenth."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return PEAK_LEARNING_RATE * (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return PEAK_LEARNING_RATE * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def take_step(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Change the weights by the gradients."""
    optimizer.param_groups[0]["lr"] = rate
    optimizer.step()


@dataclass
class Trained:
    """What training gave."""

    model: ByteGPT
    losses: list[float]
    tokens_per_s: float
    comm_share: float  # part of the time in which this rank did nothing but communicate


def train(text: Tensor, options: Options) -> Trained:
    """Train on all ranks together. Collective: every rank must call it."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, optimizer = build(options)
    if rank == 0:
        size = sum(p.numel() for p in model.parameters())
        print(f"{len(text) / 1e6:.1f} MB of text, {size / 1e6:.2f} M parameters, {ranks} ranks")
    with torch.no_grad():
        for parameter in model.parameters():
            dist.broadcast(parameter, src=0)  # the same weights everywhere, whatever happened
    buckets = GradientBuckets(model)
    losses: list[float] = []
    begun = time.perf_counter()
    with Display("training", options, shown=rank == 0) as display:
        for step, batch in enumerate(batches(text, options)):
            rows, weight = rows_of(batch, rank, ranks)
            loss = loss_of(model, rows) * weight
            buckets.start()
            loss.backward()
            loss = loss.detach()
            buckets.finish(loss)
            take_step(optimizer, learning_rate(step, options.steps))
            losses.append(loss.item())
            display.update(step + 1, losses[-1], buckets.seconds)
    seconds = time.perf_counter() - begun
    tokens = options.steps * options.batch * options.context
    return Trained(model, losses, tokens / seconds, buckets.seconds / seconds)


def train_alone(text: Tensor, options: Options) -> list[float]:
    """Train on this process what all ranks trained together; return the losses.

    Floating-point sums depend on their order. To compare the two runs closely, gradients are
    added up here as tilework adds them: each rank's rows on their own, in the order of ranks.
    """
    model, optimizer = build(options)
    losses: list[float] = []
    with Display("checking", options) as display:
        for step, batch in enumerate(batches(text, options)):
            optimizer.zero_grad()
            total = torch.zeros(())
            for rank in range(options.ranks):
                rows, weight = rows_of(batch, rank, options.ranks)
                loss = loss_of(model, rows) * weight
                loss.backward()
                total += loss.detach()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= options.ranks
            take_step(optimizer, learning_rate(step, options.steps))
            losses.append((total / options.ranks).item())
            display.update(step + 1, losses[-1])
    return losses


# --- what the user sees ------------------------------------------------------------------------


class Display:
    """A live bar on a terminal, a plain line every few seconds elsewhere."""

    def __init__(self, title: str, options: Options, shown: bool = True) -> None:
        self.title, self.steps, self.shown = title, options.steps, shown
        self.step_tokens = options.batch * options.context
        self.begun = self.printed = time.perf_counter()
        self.bar: Progress | None = None
        self.console = Console()

    def __enter__(self) -> Display:
        if self.shown and self.console.is_terminal:
            self.bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed}/{task.total}  {task.fields[text]}"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self.bar.add_task(self.title, total=self.steps, text="")
            self.bar.start()
        return self

    def update(self, step: int, loss: float, comm_seconds: float | None = None) -> None:
        if not self.shown:
            return
        now = time.perf_counter()
        passed = now - self.begun
        text = f"loss {loss:.3f}  {step * self.step_tokens / passed:,.0f} tokens/s"
        if comm_seconds is not None:
            text += f"  comm {comm_seconds / passed:.1%}"
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=step, text=text)
        elif step in (1, self.steps) or now - self.printed >= 5:
            self.printed = now
            print(f"{self.title} {step}/{self.steps}  {text}", flush=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar is not None:
            self.bar.stop()


@torch.inference_mode()
def write(model: ByteGPT, options: Options, length: int = 400) -> str:
    """Let the model continue the prompt, byte by byte."""
    generator = torch.Generator().manual_seed(options.seed)
    written = list(PROMPT.encode())
    for _ in range(length):
        logits = model(torch.tensor([written[-options.context :]]))[0, -1]
        chances = torch.softmax(logits / 0.8, dim=-1)  # below 1: likely bytes become likelier
        written.append(int(torch.multinomial(chances, 1, generator=generator)))
    text = bytes(written).decode(errors="replace")
    # What it has learned so far may include control characters, which a terminal would obey.
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def report(text: Tensor, options: Options, trained: Trained) -> None:
    """On rank 0, when the others are done: the check, a sample, and the last line."""
    results: dict[str, float] = {
        "ranks": options.ranks,
        "steps": options.steps,
        "loss_first": round(trained.losses[0], 4),
        "loss_last": round(trained.losses[-1], 4),
        "tokens_per_s": round(trained.tokens_per_s),
        "comm_share": round(trained.comm_share, 4),
    }
    if options.check:
        pairs = zip(trained.losses, train_alone(text, options), strict=True)
        results["max_rel_diff"] = max(abs(a - b) / max(b, 1e-12) for a, b in pairs)
    rule = "-" * 72
    print(f"{rule}\n{write(trained.model, options)}\n{rule}")
    print(json.dumps(results), flush=True)


def launch_myself(options: Options) -> NoReturn:
    """Become ``tilework run``, which starts this script again, once for each rank."""
    # Rank 0 alone prints here, so its lines need no "[0]" in front.
    run = ["-m", "tilework.cli", "run", "--prefix", "others", "-n", str(options.ranks)]
    os.execv(sys.executable, [sys.executable, *run, *sys.argv])


def main() -> None:
    """What each rank runs, and what starts the ranks."""
    parser = make_parser()
    options = parse_options(parser)
    try:
        text = load_text(options)
    except ValueError as error:
        parser.error(str(error))
    if "RANK" not in os.environ:
        launch_myself(options)
    dist.init_process_group()
    rank = dist.get_rank()
    trained = train(text, options)
    dist.destroy_process_group()
    if rank == 0:
        report(text, options, trained)


if __name__ == "__main__":
    main()
