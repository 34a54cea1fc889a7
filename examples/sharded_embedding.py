"""Learn what words of Python mean, in tables that are cut unevenly over several processes.

    tilework run -n 3 examples/sharded_embedding.py                 # rows as 3 : 2 : 1
    tilework run -n 2 examples/sharded_embedding.py --shares 5,1    # most rows on rank 0
    python examples/sharded_embedding.py --check                    # the script launches itself

Skip-gram: of each word in the standard library's sources, guess the words that stand around it.
The model is two tables with a vector for each word, and no rank holds all of either. Each rank
looks up words of its own part of the batch; their vectors come from the ranks that hold them,
and in backward their gradients go there. Halfway the tables move to fewer ranks, together with
the optimizer's state, and training goes on.

The model's code does not know of all that: ``--check`` trains the same model with plain tables
on one process and compares the losses. The last line that rank 0 prints is one JSON object.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from common import (
    Display,
    Parser,
    launch_myself,
    launched_ranks,
    stdlib_files,
    whole_number,
    whole_numbers,
)
from torch import Tensor, nn
from torch.nn import functional as F

import tilework.distributed as dist
from tilework.sharded import (
    EnumerableShardingSpec,
    ShardedOptimizer,
    ShardedTensor,
    ShardMetadata,
    empty,
    show,
    zeros,
)

WINDOW = 4  # how far apart words may be that stand together
NEGATIVES = 8  # random words for each that stands there
LEARNING_RATE = 0.15
FEWEST_WORDS = 100
#: Of words that are more frequent than this, only some occurrences are read.
FREQUENT = 1e-3
WORD = re.compile(r"[A-Za-z_]\w+")
#: Similar words are looked for among so many of the most frequent ones.
FAMILIAR = 2000
SHOWN = ("int", "True", "append", "raise", "socket", "open")


# --- what the user can ask for ---------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """The flags, checked."""

    steps: int
    batch: int
    words: int
    width: int
    shares: list[int]  # of each rank, how many parts of the rows it holds
    fewer: int  # ranks that hold the tables in the second half
    seed: int
    text: Path | None
    check: bool

    @property
    def ranks(self) -> int:
        """How many processes train."""
        return len(self.shares)


def make_parser() -> Parser:
    """Every flag, with its default."""
    parser = Parser(description="Train word vectors in unevenly sharded tables, with tilework.")
    add, count = parser.add_argument, whole_number(1)
    add("--steps", type=count, default=250, help="training steps (default: %(default)s)")
    add("--batch", type=count, default=2048, help="words in a step, all ranks (%(default)s)")
    add("--words", type=count, default=10_000, help="rows of the tables, at most (%(default)s)")
    add("--width", type=count, default=64, help="numbers that stand for a word (%(default)s)")
    add("--shares", type=whole_numbers, help="the ranks' parts of the rows (3,2,1 for three)")
    add("--fewer", type=count, help="ranks with rows in the second half (default: all but one)")
    add("--seed", type=count, default=1, help="of all random numbers (%(default)s)")
    add("--text", type=Path, help="a file to learn from (default: Python's own library)")
    add("--check", action="store_true", help="train again with plain tables, compare the losses")
    return parser


def parse_options(parser: Parser) -> Options:
    """Read the command line; end the program with one clear message where it is wrong."""
    given = parser.parse_args()
    launched = launched_ranks()
    if given.shares is None:
        given.shares = list(range(launched or 3, 0, -1))
    ranks = len(given.shares)
    if launched not in (None, ranks):
        parser.error(f"--shares has {ranks} numbers, but the launcher started {launched} ranks")
    if given.fewer is None:
        given.fewer = max(1, ranks - 1)
    if given.fewer > ranks:
        parser.error(f"--fewer {given.fewer}: there are only {ranks} ranks")
    if given.words < FEWEST_WORDS:
        parser.error(f"--words {given.words}: at least {FEWEST_WORDS} are needed")
    if given.steps < 2:
        parser.error(f"--steps {given.steps}: there must be 2 to reshard in between")
    if given.text is not None and not given.text.is_file():
        parser.error(f"--text {given.text}: no such file")
    return Options(**vars(given))


# --- the text ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """Words of a language, and a text as their numbers."""

    words: list[str]
    frequency: Tensor  # (words,): how much of the text each is
    numbers: Tensor  # (length,)


def load_text(options: Options) -> Text:
    """The words of the text but for rare ones, the same on every rank.

    Raises:
        ValueError: They are too few.
    """
    found: list[str] = []
    for path in [options.text] if options.text else stdlib_files():
        found += WORD.findall(path.read_text(errors="replace"))
    tally = Counter(found).most_common(options.words)
    number_of = {word: number for number, (word, _) in enumerate(tally)}
    numbers = torch.tensor([number_of[word] for word in found if word in number_of])
    frequency = torch.tensor([times for _, times in tally]) / len(numbers)
    keep = (FREQUENT / frequency).sqrt()[numbers] if len(numbers) else numbers
    generator = torch.Generator().manual_seed(options.seed)
    numbers = numbers[torch.rand(len(numbers), generator=generator) < keep]
    if len(tally) < FEWEST_WORDS or len(numbers) <= 2 * WINDOW:
        raise ValueError(f"--text {options.text}: {len(tally)} different words are too few")
    return Text([word for word, _ in tally], frequency, numbers)


def batches(text: Text, options: Options) -> Iterator[tuple[Tensor, Tensor]]:
    """Global batches, the same on every rank: words, and for each one that stands near and others.

    Of sizes (batch,) and (batch, 1 + NEGATIVES).
    """
    generator = torch.Generator().manual_seed(options.seed)
    odds = text.frequency**0.75
    for _ in range(options.steps):
        at = torch.randint(
            WINDOW, len(text.numbers) - WINDOW, (options.batch,), generator=generator
        )
        by = torch.randint(1, WINDOW + 1, (options.batch,), generator=generator)
        by *= torch.randint(2, (options.batch,), generator=generator) * 2 - 1
        others = torch.multinomial(odds, options.batch * NEGATIVES, True, generator=generator)
        near = text.numbers[at + by].unsqueeze(1)
        yield text.numbers[at], torch.cat((near, others.view(-1, NEGATIVES)), dim=1)


# --- the model ---------------------------------------------------------------------------------


class SkipGram(nn.Module):
    """Two tables, plain or sharded: vectors of words, and of words that stand around others."""

    def __init__(self, words: Tensor, around: Tensor) -> None:
        super().__init__()
        self.words = nn.Parameter(words)
        self.around = nn.Parameter(around)

    def forward(self, words: Tensor, candidates: Tensor) -> Tensor:
        """Of sizes (n,) and (n, m): how likely each candidate stands near, (n, m) logits."""
        vectors = F.embedding(words, self.words).unsqueeze(2)  # (n, width, 1)
        return (F.embedding(candidates, self.around) @ vectors).squeeze(2)


def loss_of(model: SkipGram, words: Tensor, candidates: Tensor) -> Tensor:
    """The sum over words of the cross-entropies: the first candidate stands near, others not."""
    logits = model(words, candidates)
    truth = torch.zeros_like(logits)
    truth[:, 0] = 1
    return F.binary_cross_entropy_with_logits(logits, truth, reduction="sum")


# --- sharded tables ----------------------------------------------------------------------------


def row_shards(n_rows: int, width: int, shares: Sequence[int]) -> EnumerableShardingSpec:
    """Rows for the first ranks, as many as their shares say."""
    ends = [round(n_rows * sum(shares[: i + 1]) / sum(shares)) for i in range(len(shares))]
    return EnumerableShardingSpec(
        ShardMetadata([start, 0], [end - start, width], f"rank:{rank}/cpu")
        for rank, (start, end) in enumerate(zip([0, *ends], ends, strict=False))
    )


def new_tables(n_rows: int, options: Options) -> tuple[ShardedTensor, ShardedTensor]:
    """Small random vectors, and zeros. Each rank makes its own rows; no rank ever has them all."""
    spec = row_shards(n_rows, options.width, options.shares)
    words = empty(spec, n_rows, options.width)
    generator = torch.Generator().manual_seed(options.seed + dist.get_rank())
    for tile in words.local_tiles():
        tile.uniform_(-0.5 / options.width, 0.5 / options.width, generator=generator)
    return words, zeros(spec, n_rows, options.width)


def on_rank_0(table: Tensor) -> Tensor | None:
    """The whole table as a plain tensor. Collective."""
    assert isinstance(table, ShardedTensor)
    out = torch.empty(table.size(), dtype=table.dtype) if dist.get_rank() == 0 else None
    table.gather(dst=0, out=out)
    return out


def rows_held(table: Tensor) -> list[int]:
    """How many rows each rank holds."""
    assert isinstance(table, ShardedTensor)
    held = [0] * dist.get_world_size()
    for shard in table.metadata().shards_metadata:
        assert shard.placement is not None
        held[shard.placement.rank() or 0] += shard.shard_sizes[0]
    return held


# --- training ----------------------------------------------------------------------------------


@dataclass
class Trainer:
    """Takes steps, on all ranks together or alone."""

    model: SkipGram
    optimizer: torch.optim.Optimizer
    options: Options
    rank: int = 0
    ranks: int = 1
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def take(self, title: str, data: Iterable[tuple[Tensor, Tensor]], steps: int) -> None:
        """Train on these batches; show how it goes."""
        begun = time.perf_counter()
        shown = self.rank == 0
        with Display(title, steps, "words", self.options.batch, shown) as display:
            for step, (words, candidates) in enumerate(data, 1):
                mine = (batch.tensor_split(self.ranks)[self.rank] for batch in (words, candidates))
                # Gradients are those of the sum of all ranks' losses: the mean over the batch.
                loss = loss_of(self.model, *mine) / self.options.batch
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                total = loss.detach()
                if self.ranks > 1:
                    dist.all_reduce(total)
                self.losses.append(total.item())
                display.update(step, self.losses[-1])
        self.seconds += time.perf_counter() - begun


@dataclass
class Trained:
    """What training gave."""

    losses: list[float]
    words_per_s: float
    rows: list[list[int]]  # that each rank held, before and after the tables moved
    near: dict[str, list[str]]  # what words have become similar to some
    first_vectors: Tensor | None  # to check it: what training began with, on rank 0


def train(text: Text, options: Options) -> Trained:
    """Train in sharded tables. Collective: every rank must call it."""
    rank = dist.get_rank()
    model = SkipGram(*new_tables(len(text.words), options))
    first_vectors = on_rank_0(model.words) if options.check else None
    optimizer = ShardedOptimizer(model.named_parameters(), torch.optim.Adagrad, lr=LEARNING_RATE)
    trainer = Trainer(model, optimizer, options, rank, dist.get_world_size())
    data, half = batches(text, options), options.steps // 2
    rows = [rows_held(model.words)]
    if rank == 0:
        show(model.words)
    trainer.take("training", islice(data, half), half)

    fewer = row_shards(len(text.words), options.width, options.shares[: options.fewer])
    for name in ("words", "around"):
        optimizer.reshard_(name, fewer)
    rows.append(rows_held(model.words))
    if rank == 0:
        show(model.words)
    trainer.take("resharded", data, options.steps - half)

    near = nearest(model.words, text)
    speed = options.steps * options.batch / trainer.seconds
    return Trained(trainer.losses, speed, rows, near, first_vectors)


def train_plain(text: Text, options: Options, first_vectors: Tensor) -> list[float]:
    """Train the same batches on this process, in plain tables; return the losses."""
    model = SkipGram(first_vectors.clone(), torch.zeros_like(first_vectors))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LEARNING_RATE)
    trainer = Trainer(model, optimizer, options)
    trainer.take("in plain tables", batches(text, options), options.steps)
    return trainer.losses


@torch.no_grad()
def nearest(table: Tensor, text: Text, n: int = 4) -> dict[str, list[str]]:
    """For some words those whose vectors point almost the same way. Collective."""
    assert isinstance(table, ShardedTensor)
    unit = table.like((F.normalize(t) for t in table.local_tiles()), requires_grad=False)
    asked = [word for word in SHOWN if word in text.words]
    vectors = F.embedding(torch.tensor([*map(text.words.index, asked)], dtype=torch.long), unit)
    likeness = F.linear(vectors, unit)[:, :FAMILIAR]
    found = likeness.topk(n + 1).indices[:, 1:]  # the first is the word itself
    return {w: [text.words[i] for i in row] for w, row in zip(asked, found.tolist(), strict=True)}


# --- what the user sees ------------------------------------------------------------------------


def report(text: Text, options: Options, trained: Trained) -> None:
    """On rank 0, when the others are done: similar words, the check, and the last line."""
    for word, near in trained.near.items():
        print(f"{word:>10} is used like {', '.join(near)}")
    results: dict[str, object] = {
        "ranks": options.ranks,
        "steps": options.steps,
        "rows": trained.rows[0],
        "rows_after": trained.rows[1],
        "loss_first": round(trained.losses[0], 4),
        "loss_last": round(trained.losses[-1], 4),
        "words_per_s": round(trained.words_per_s),
    }
    if options.check:
        assert trained.first_vectors is not None
        plain = train_plain(text, options, trained.first_vectors)
        pairs = zip(trained.losses, plain, strict=True)
        results["max_rel_diff"] = max(abs(a - b) / max(b, 1e-12) for a, b in pairs)
    print(json.dumps(results), flush=True)


def main() -> None:
    """What each rank runs, and what starts the ranks."""
    parser = make_parser()
    options = parse_options(parser)
    try:
        text = load_text(options)
    except ValueError as error:
        parser.error(str(error))
    if "RANK" not in os.environ:
        launch_myself(options.ranks)
    dist.init_process_group()
    trained = train(text, options)
    dist.destroy_process_group()
    if int(os.environ["RANK"]) == 0:
        report(text, options, trained)


if __name__ == "__main__":
    main()
