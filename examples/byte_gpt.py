"""Train a small GPT on bytes, on several processes, with tilework.

    tilework run -n 4 examples/byte_gpt.py --dp 2 --tp 2   # four ranks, two by two
    python examples/byte_gpt.py --dp 2 --tp 2              # the same: the script launches itself
    python examples/byte_gpt.py --text my_book.txt         # your own text: a file or a folder

The ranks form a mesh of two axes. Along ``dp`` they share the batch: each has some of its rows.
Along ``tp`` they share the model: each has some of the attention heads, of the features between
``up`` and ``down``, and of the table of bytes; what is between the layers is cut along the
sequence. ``plan`` says so in a few lines, and ``parallelize_module`` makes the parameters DTensors.
The model and the training loop are those of one process: operators on DTensors send what has to be
sent, and gradients of what several ranks hold are summed over them, together, after each backward.

``--check`` trains the same batches again on one process and compares the losses. The text is
Python's own standard library, so there is nothing to download. The last line that rank 0 prints is
one JSON object with the results.
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
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn import functional as F

import tilework.distributed as dist
from tilework.dtensor import DTensor, Replicate, Shard, distribute_tensor, explain
from tilework.launch.cores import usable_cores
from tilework.mesh import DeviceMesh, init_device_mesh
from tilework.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

VOCABULARY = 256  # one token per byte value
HEAD_WIDTH = 32
PEAK_LEARNING_RATE = 3e-3
PROMPT = "def "
#: Steps in which sums in another order have not yet made losses differ.
EARLY_STEPS = 10
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
    dp: int
    tp: int
    seed: int
    batch: int
    context: int
    width: int
    layers: int
    text: Path | None
    check: bool


def make_parser() -> Parser:
    """Every flag, with its default."""
    parser = Parser(description="Train a small GPT on bytes, on several processes.")
    count = whole_number(1)
    add = parser.add_argument
    add("--steps", type=count, default=1100, help="training steps (default: %(default)s)")
    add("--ranks", type=count, help="processes (default: one for each core, but at least 4)")
    add("--dp", type=count, help="ranks that share the batch (default: ranks / tp)")
    add("--tp", type=count, help="ranks that share the model (default: 2 if ranks is 4, 8, …)")
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
    set_mesh(parser, given, int(launched) if launched else None)
    if given.width % HEAD_WIDTH:
        parser.error(f"--width {given.width} is not a multiple of {HEAD_WIDTH}")
    if given.batch < given.dp:
        parser.error(
            f"--batch {given.batch} is less than one sequence for each of {given.dp} ranks: "
            f"use --batch {given.dp} or more, or fewer ranks"
        )
    heads = given.width // HEAD_WIDTH
    if given.tp > heads:
        parser.error(
            f"--tp {given.tp} is more than the {heads} attention heads, one for "
            f"each {HEAD_WIDTH} of --width {given.width}"
        )
    return Options(**vars(given))


def set_mesh(parser: Parser, given: argparse.Namespace, launched: int | None) -> None:
    """Complete ``--ranks``, ``--dp`` and ``--tp``, so that ranks = dp * tp."""
    ranks = given.ranks or launched
    if ranks is None:
        if given.dp is None and given.tp is None:
            ranks = max(4, min(usable_cores(), given.batch))
        else:
            ranks = (given.dp or 1) * (given.tp or 1)
    if given.tp is None:
        # Without --dp, two by two where that can be.
        both = given.dp is None and ranks % 4 == 0 and given.width >= 2 * HEAD_WIDTH
        given.tp = 2 if both else max(1, ranks // (given.dp or ranks))
    if given.dp is None:
        given.dp = max(1, ranks // given.tp)
    given.ranks = ranks
    if given.dp * given.tp != ranks:
        parser.error(f"--dp {given.dp} times --tp {given.tp} is not the number of ranks, {ranks}")


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
        parts = self.qkv(self.norm_1(x)).unflatten(-1, (self.heads, 3, HEAD_WIDTH))
        q, k, v = parts.transpose(1, 2).unbind(3)  # each (batch, heads, time, HEAD_WIDTH)
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
        # The table that turns bytes into vectors also scores them (tied weights).
        self.score = nn.Linear(width, VOCABULARY, bias=False)
        self.score.weight = self.byte.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What adds to the stream starts smaller, so that depth does not make it grow.
                adds = name.endswith(("attended.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if adds else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.byte(tokens) + self.position[: tokens.shape[1]]
        scores: Tensor = self.score(self.norm(self.blocks(x)))
        return scores


def loss_of(model: ByteGPT, rows: Tensor) -> Tensor:
    """Mean cross-entropy, in nats for a byte, of predicting each byte from those before it."""
    logits: Tensor = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


# --- on a mesh ---------------------------------------------------------------------------------


def plan(options: Options) -> dict[str, ParallelStyle]:
    """How the model's layers are cut along ``tp``.

    ``Shard(1)`` is the sequence. A layer that takes it so gathers it; one that gives it so adds up
    what the ranks have computed, and leaves each its part.
    """
    heads = torch.arange(options.width // HEAD_WIDTH).tensor_split(options.tp)  # 4 over 3: 2, 1, 1
    qkv = Shard(-1, sizes=tuple(3 * HEAD_WIDTH * len(part) for part in heads))
    mixed = Shard(-1, sizes=tuple(HEAD_WIDTH * len(part) for part in heads))
    sequence = Shard(1)
    columns = partial(ColwiseParallel, input_layouts=sequence, use_local_output=False)
    rows = partial(RowwiseParallel, output_layouts=sequence, use_local_output=False)
    return {
        "byte": rows(input_layouts=Replicate()),
        "blocks.*.norm_?": SequenceParallel(),
        "blocks.*.qkv": columns(output_layouts=qkv),
        "blocks.*.attended": rows(input_layouts=mixed),
        "blocks.*.up": columns(),
        "blocks.*.down": rows(),
        "norm": SequenceParallel(),
        "score": columns(),
    }


def build(options: Options) -> ByteGPT:
    """The model, the same for the same seed."""
    torch.manual_seed(options.seed)
    return ByteGPT(options.width, options.layers, options.context)


def make_optimizer(model: ByteGPT) -> torch.optim.Optimizer:
    """It works on the parameters as they are, plain or DTensors."""
    return torch.optim.AdamW(
        model.parameters(), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), fused=True
    )


def learning_rate(step: int, steps: int) -> float:
    """Up in a straight line for the first twentieth, then down along a cosine to a tenth."""
    warm_up = max(1, steps // 20)
    if step < warm_up:
        return PEAK_LEARNING_RATE * (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return PEAK_LEARNING_RATE * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


@dataclass
class Trained:
    """What training gave."""

    model: ByteGPT  # whole, on every rank
    losses: list[float]
    tokens_per_s: float
    messages: int  # in each step
    moved_bytes: int  # for a rank, in each step


def train(text: Tensor, options: Options) -> Trained:
    """Train on all ranks together. Collective: every rank must call it."""
    mesh = init_device_mesh("cpu", (options.dp, options.tp), mesh_dim_names=("dp", "tp"))
    model = build(options)
    parallelize_module(model, mesh, plan(options))
    optimizer = make_optimizer(model)
    messages, moved_bytes = tried(
        model, on_mesh(torch.zeros(options.batch, options.context + 1).long(), mesh)
    )
    shown = dist.get_rank() == 0
    if shown:
        size = sum(p.numel() for p in model.parameters())
        print(
            f"{len(text) / 1e6:.1f} MB of text, {size / 1e6:.2f} M parameters, "
            f"{options.ranks} ranks: dp={options.dp} tp={options.tp}\n"
            f"each step sends {messages} messages, {moved_bytes / 1e6:.1f} MB for each rank"
        )
    losses: list[float] = []
    begun = time.perf_counter()
    with Display("training", options, shown) as display:
        for step, batch in enumerate(batches(text, options)):
            optimizer.param_groups[0]["lr"] = learning_rate(step, options.steps)
            optimizer.zero_grad()
            loss = loss_of(model, on_mesh(batch, mesh))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            display.update(step + 1, losses[-1])
    seconds = time.perf_counter() - begun
    tokens = options.steps * options.batch * options.context
    return Trained(gathered(model, options), losses, tokens / seconds, messages, moved_bytes)


def tried(model: ByteGPT, rows: Tensor) -> tuple[int, int]:
    """How many messages a step sends, and how many bytes a rank moves. Collective."""
    with explain() as log:  # print(log) tells of each message why it is sent
        loss_of(model, rows).backward()
    return len(log), log.nbytes


def on_mesh(batch: Tensor, mesh: DeviceMesh) -> DTensor:
    """A batch that all ranks have drawn, of which each takes its rows; 32 over 3 are 11, 11, 10."""
    rows = Shard(0, sizes=tuple(map(len, batch.tensor_split(mesh.size("dp")))))
    return distribute_tensor(batch, mesh, [rows, Replicate()], src_data_rank=None)


def gathered(model: ByteGPT, options: Options) -> ByteGPT:
    """The same model with plain parameters, on every rank. Collective."""
    whole = build(options)
    with torch.no_grad():
        for mine, parameter in zip(whole.parameters(), model.parameters(), strict=True):
            assert isinstance(parameter, DTensor)
            mine.copy_(parameter.full_tensor())
    return whole


def train_alone(text: Tensor, options: Options) -> list[float]:
    """Train on this process what all ranks trained together; return the losses.

    Floating-point sums depend on their order. To compare the two runs closely, the rows of each
    part of the batch are taken on their own, and gradients added up in the order of ranks.
    """
    model = build(options)
    optimizer = make_optimizer(model)
    losses: list[float] = []
    with Display("checking", options) as display:
        for step, batch in enumerate(batches(text, options)):
            optimizer.param_groups[0]["lr"] = learning_rate(step, options.steps)
            optimizer.zero_grad()
            total = torch.zeros(())
            for rows in batch.tensor_split(options.dp):
                loss = loss_of(model, rows) * (len(rows) / len(batch))
                loss.backward()
                total += loss.detach()
            optimizer.step()
            losses.append(total.item())
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

    def update(self, step: int, loss: float) -> None:
        if not self.shown:
            return
        now = time.perf_counter()
        passed = now - self.begun
        text = f"loss {loss:.3f}  {step * self.step_tokens / passed:,.0f} tokens/s"
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
        "dp": options.dp,
        "tp": options.tp,
        "steps": options.steps,
        "loss_first": round(trained.losses[0], 4),
        "loss_last": round(trained.losses[-1], 4),
        "tokens_per_s": round(trained.tokens_per_s),
        "messages_per_step": trained.messages,
        "mb_per_step": round(trained.moved_bytes / 1e6, 3),
    }
    if options.check:
        alone = train_alone(text, options)
        apart = [abs(a - b) / max(b, 1e-12) for a, b in zip(trained.losses, alone, strict=True)]
        results["max_rel_diff_early"] = max(apart[:EARLY_STEPS])
        results["max_rel_diff"] = max(apart)
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
