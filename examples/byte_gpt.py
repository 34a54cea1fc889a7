"""Train a small GPT on bytes, on several processes, with tilework.

    tilework run -n 4 examples/byte_gpt.py                           # two by two: ddp and tp
    python examples/byte_gpt.py --parallel fsdp,tp --dp 2 --tp 2     # the script launches itself
    python examples/byte_gpt.py --parallel ddp --text my_book.txt    # your text: a file or a folder

The ranks form a mesh of two axes. Along ``dp`` they share the batch: each has some of its rows.
Either each holds all of the model and gradients are averaged (``ddp``), or each holds a shard of
everything and gathers a layer when it computes it (``fsdp``). Along ``tp`` they share the model:
each has some of the attention heads, of the features between ``up`` and ``down``, and of the
tables of bytes; what is between the layers is cut along the sequence. ``plan`` says so in a few
lines. ``in_parallel`` is all that it takes: model, loss and optimizer are those of one process.

``--resilient`` keeps the state of each step in memory that outlives ranks: kill one with
``kill -9`` (or by ``--kill STEP``), and the others go on from the last step, with losses as if
nothing had been.

``--capture`` records a step once, and runs the record from then on, with the same losses;
``--capture inductor`` compiles it, too.

``--check`` trains the same batches again on one process and compares the losses. The text is
Python's own standard library, so there is nothing to download. The last line that rank 0 prints is
one JSON object with the results.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Display, Parser, launch_myself, ranks_asked, stdlib_files, whole_number
from torch import Tensor, nn
from torch.nn import functional as F

import tilework.distributed as dist
from tilework.capture import capture
from tilework.cores import usable_cores
from tilework.dtensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from tilework.mesh import DeviceMesh, init_device_mesh
from tilework.parallel import (
    ColwiseParallel,
    DistributedDataParallel,
    ParallelStyle,
    PrepareModuleOutput,
    Resilient,
    RowwiseParallel,
    Schedule,
    SequenceParallel,
    Stages,
    comm_hooks,
    fully_shard,
    parallelize_module,
    pipeline,
)

VOCABULARY = 256  # one token per byte value
HEAD_WIDTH = 32
PEAK_LEARNING_RATE = 3e-3
PROMPT = "def "
#: Steps in which sums in another order have not yet made losses differ.
EARLY_STEPS = 10
#: What the ranks can share, by the names of ``--parallel``.
WAYS = ("ddp", "fsdp", "tp", "pp")
MICROBATCHES = 2  # parts of a batch, which pass the stages of pp one after the other
HOOKS = ("all_reduce", "bf16", "powersgd")


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


class Bytes(nn.Module):
    """(batch, time) bytes to vectors: of the byte, of the three before it, and of its position."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(VOCABULARY, width)
        self.before = nn.ModuleList(nn.Embedding(VOCABULARY, width) for _ in range(3))
        self.position = nn.Embedding(context, width)

    def forward(self, tokens: Tensor) -> Tensor:
        position = torch.zeros_like(tokens) + torch.arange(tokens.shape[1])
        vectors: Tensor = self.byte(tokens) + self.position(position)
        for places, table in enumerate(self.before, 1):
            vectors = vectors + table(delayed(tokens, places))
        return vectors


def delayed(tokens: Tensor, places: int) -> Tensor:
    """What stood so many places before; zeros where nothing did."""
    return F.pad(tokens, (places, 0))[:, : tokens.shape[1]]


class ByteGPT(nn.Module):
    """(batch, time) bytes to (batch, time, 256) logits of the byte that follows each."""

    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.bytes = Bytes(width, context)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        # The table that turns bytes into vectors also scores them (tied weights).
        self.score = nn.Linear(width, VOCABULARY, bias=False)
        self.score.weight = self.bytes.byte.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What adds to the stream starts smaller, so that depth does not make it grow.
                adds = name.endswith(("attended.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if adds else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.score(self.norm(self.blocks(self.bytes(tokens))))
        return scores


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Mean cross-entropy, in nats for a byte, of predicting each byte from those before it."""
    logits: Tensor = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


# --- in parallel -------------------------------------------------------------------------------


def heads_on_ranks(options: Options) -> tuple[Shard, Shard]:
    """How heads are cut: their queries, keys and values together; and what they give."""
    heads = torch.arange(options.width // HEAD_WIDTH).tensor_split(options.tp)  # 4 over 3: 2, 1, 1
    widths = [HEAD_WIDTH * len(part) for part in heads]
    return Shard(-1, sizes=tuple(3 * width for width in widths)), Shard(-1, sizes=tuple(widths))


def plan(options: Options) -> dict[str, ParallelStyle]:
    """How the model's layers are cut along ``tp``.

    ``Shard(1)`` is the sequence. A layer that takes it so gathers it; one that gives it so adds up
    what the ranks have computed, and leaves each its part.
    """
    qkv, mixed = heads_on_ranks(options)
    sequence = Shard(1)
    columns = partial(ColwiseParallel, input_layouts=sequence, use_local_output=False)
    rows = partial(RowwiseParallel, output_layouts=sequence, use_local_output=False)
    table = RowwiseParallel(
        input_layouts=Replicate(), output_layouts=Partial(), use_local_output=False
    )
    return {
        "bytes.byte": table,
        "bytes.before.*": table,
        "bytes.position": table,
        "bytes": PrepareModuleOutput(
            output_layouts=Partial(), desired_output_layouts=sequence, use_local_output=False
        ),
        "blocks.*.norm_?": SequenceParallel(),
        "blocks.*.qkv": columns(output_layouts=qkv),
        "blocks.*.attended": rows(input_layouts=mixed),
        "blocks.*.up": columns(),
        "blocks.*.down": rows(),
        "norm": SequenceParallel(),
        "score": columns(),
    }


def plan_in_stages(options: Options) -> dict[str, ParallelStyle]:
    """How the layers of a stage are cut along ``tp``: plain tensors go between stages."""
    qkv, mixed = heads_on_ranks(options)
    columns = partial(ColwiseParallel, use_local_output=False)
    return {
        "blocks.*.qkv": columns(output_layouts=qkv),
        "blocks.*.attended": RowwiseParallel(input_layouts=mixed),
        "blocks.*.up": columns(),
        "blocks.*.down": RowwiseParallel(),
    }


def in_stages(model: ByteGPT, options: Options, mesh: DeviceMesh) -> Stages:
    """The stages of this rank, each on the other axes of the mesh. Collective."""
    schedule = Schedule.one_forward_one_backward(options.pp, MICROBATCHES)
    stages = pipeline(model, mesh["pp"], split="even", schedule=schedule)
    for number, part in enumerate(stages.parts):
        if "tp" in options.parallel:
            parallelize_module(part, mesh["tp"], plan_in_stages(options))
        if "fsdp" in options.parallel:
            fully_shard(part, mesh=mesh["dp"])
        if "ddp" in options.parallel:
            stages.parts[number] = DistributedDataParallel(part, device_mesh=mesh["dp"])
    return stages


def in_parallel(model: ByteGPT, options: Options, mesh: DeviceMesh) -> nn.Module:
    """The model on the mesh, to be called as before. Collective: every rank must call it."""
    ways = options.parallel
    if "pp" in ways:
        return in_stages(model, options, mesh)
    if ways == ("tp",):  # with several ranks along dp, DTensors share the batch as well
        return parallelize_module(model, mesh, plan(options))
    if "tp" in ways:
        parallelize_module(model, mesh["tp"], plan(options))
    if "fsdp" in ways:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        return model
    ddp = DistributedDataParallel(model, device_mesh=mesh["dp"], gradient_as_bucket_view=True)
    add_hook(ddp, options)
    return ddp


def add_hook(ddp: DistributedDataParallel, options: Options) -> None:
    """Let gradients be reduced as ``--hook`` says."""
    if options.hook == "bf16":
        ddp.register_comm_hook(None, comm_hooks.bf16_compress_hook)
    elif options.hook == "powersgd":
        state = comm_hooks.PowerSGDState(
            ddp.process_group,
            matrix_approximation_rank=options.hook_rank,
            start_powerSGD_iter=max(2, options.steps // 20),
        )
        ddp.register_comm_hook(state, comm_hooks.powerSGD_hook)


def backward_of(model: nn.Module, batch: Tensor, options: Options, mesh: DeviceMesh) -> Tensor:
    """Backward of this rank's loss of a batch; returns the loss, without a graph."""
    if not isinstance(model, Stages):
        loss = loss_on(model, batch, options, mesh)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()
    rows = batch.tensor_split(options.dp)[mesh.get_local_rank("dp")]
    share = len(rows) * options.dp / len(batch)

    def loss_of_rows(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten()) * share

    return model.step(rows[:, :-1], target=rows[:, 1:], loss=loss_of_rows, weight="rows")


def loss_on(model: nn.Module, batch: Tensor, options: Options, mesh: DeviceMesh) -> Tensor:
    """This rank's loss of a batch that all ranks have drawn: of its rows, 32 over 3 are 11, 11, 10.

    Its mean over the ranks along ``dp`` is the loss of the batch.
    """
    parts = batch.tensor_split(options.dp)
    if options.parallel == ("tp",):  # DTensors know the whole batch, and have its loss
        rows = Shard(0, sizes=tuple(map(len, parts)))
        return loss_of(
            model, distribute_tensor(batch, mesh, [rows, Replicate()], src_data_rank=None)
        )
    rows_here = parts[mesh.get_local_rank("dp")]
    return loss_of(model, rows_here) * (len(rows_here) * options.dp / len(batch))


def mean_of(loss: Tensor, options: Options, mesh: DeviceMesh) -> float:
    """The loss of the whole batch, on every rank. Collective."""
    mean = torch.tensor(loss.item(), dtype=torch.float64)
    if options.parallel != ("tp",):
        dist.all_reduce(mean, dist.ReduceOp.AVG, mesh.get_group("dp"))
    return mean.item()


def gathered(model: nn.Module, options: Options) -> ByteGPT:
    """The same model with plain parameters, on every rank. Collective."""
    plain = build(options)
    if isinstance(model, Stages):
        state = model.state_dict().items()
        here = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state}
        parts: list[Any] = [None] * options.pp
        dist.all_gather_object(parts, here, model.mesh.get_group())
        plain.load_state_dict({k: v for part in parts for k, v in part.items()})
        return plain
    with torch.no_grad():
        for mine, parameter in zip(plain.parameters(), model.parameters(), strict=True):
            mine.copy_(parameter.full_tensor() if isinstance(parameter, DTensor) else parameter)
    return plain


# --- training ----------------------------------------------------------------------------------


def build(options: Options) -> ByteGPT:
    """The model, the same for the same seed."""
    torch.manual_seed(options.seed)
    return ByteGPT(options.width, options.layers, options.context)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
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

    model: ByteGPT  # with plain parameters, on every rank
    losses: list[float]
    tokens_per_s: float
    messages: int  # in each step
    moved_bytes: int  # for a rank, in each step


def train(text: Tensor, options: Options) -> Trained:
    """Train on all ranks together. Collective: every rank must call it."""
    shape = {"pp": options.pp, "dp": options.dp, "tp": options.tp}
    axes = {name: size for name, size in shape.items() if name != "pp" or "pp" in options.parallel}
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    model = in_parallel(build(options), options, mesh)
    optimizer = make_optimizer(model)
    shown = dist.get_rank() == 0
    if shown:
        size = sum(p.numel() for p in model.parameters())
        print(
            f"{len(text) / 1e6:.1f} MB of text, {size / 1e6:.2f} M parameters, {options.ranks} "
            f"ranks: {' and '.join(options.parallel)}, dp={options.dp} tp={options.tp}"
        )

    def step(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = backward_of(model, batch, options, mesh)
        optimizer.step()
        return loss

    if options.capture:
        step = capture(step, backend=options.capture)
    losses: list[float] = []
    sent = [(0, 0)]
    begun = time.perf_counter()
    with Display("training", options.steps, "tokens", tokens_of(options), shown) as display:
        for number, batch in enumerate(batches(text, options)):
            optimizer.param_groups[0]["lr"] = learning_rate(number, options.steps)
            losses.append(mean_of(step(batch), options, mesh))
            display.update(number + 1, losses[-1])
            sent = [*sent[-1:], traffic(mesh)]
    seconds = time.perf_counter() - begun
    (messages, moved), (messages_then, moved_then) = sent
    return Trained(
        gathered(model, options),
        losses,
        options.steps * tokens_of(options) / seconds,
        messages_then - messages,
        moved_then - moved,
    )


def train_resilient(text: Tensor, options: Options) -> tuple[Trained, Options]:
    """As :func:`train`, and go on when ranks are lost; also the options of those that are left."""
    place: list[tuple[Options, DeviceMesh]] = []  # of the ranks that there are now
    traffics = [(0, 0)]

    def build_here() -> dict[str, Any]:
        now = for_ranks(options, dist.get_world_size())
        mesh = init_device_mesh("cpu", (now.dp, now.tp), mesh_dim_names=("dp", "tp"))
        place[:] = [(now, mesh)]
        model = in_parallel(build(now), now, mesh)
        losses = torch.zeros(options.steps, dtype=torch.float64)
        drawn = Batches(text, options)
        return {
            "model": model,
            "optimizer": make_optimizer(model),
            "batches": drawn,
            "losses": losses,
        }

    def step(state: dict[str, Any], number: int) -> float:
        ((now, mesh),) = place
        if number + 1 == options.kill and now.ranks == options.ranks == dist.get_rank() + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        state["optimizer"].param_groups[0]["lr"] = learning_rate(number, options.steps)
        state["optimizer"].zero_grad()
        loss = loss_on(state["model"], state["batches"].draw(), now, mesh)
        loss.backward()
        state["optimizer"].step()
        state["losses"][number] = mean_of(loss, now, mesh)
        traffics[:] = [*traffics[-1:], traffic(mesh)]
        return float(state["losses"][number])

    loop = Resilient(build_here, step)
    begun = time.perf_counter()
    with Display("training", options.steps, "tokens", tokens_of(options), shown()) as display:
        for number, loss in loop.run(options.steps):
            display.shown = shown()
            display.update(number + 1, loss)
    seconds = time.perf_counter() - begun
    for event in loop.events[1:] if shown() else ():
        ranks, took = ", ".join(map(str, event.seats)), 1000 * event.seconds
        print(f"{event.kind}: ranks {ranks} went on after step {event.steps}, {took:.0f} ms later")
    now, _ = place[0]
    (messages, moved), (messages_then, moved_then) = traffics
    model, losses = gathered(loop.state["model"], now), loop.state["losses"].tolist()
    speed = options.steps * tokens_of(options) / seconds
    return Trained(model, losses, speed, messages_then - messages, moved_then - moved), now


def shown() -> bool:
    """True on the rank that prints."""
    return dist.get_rank() == 0


def for_ranks(options: Options, ranks: int) -> Options:
    """The options for another number of ranks."""
    heads = options.width // HEAD_WIDTH
    if "tp" not in options.parallel:
        tp = 1
    else:
        most = ranks if options.parallel == ("tp",) and options.dp == 1 else options.tp
        tp = max(n for n in range(1, min(most, heads, ranks) + 1) if ranks % n == 0)
    return replace(options, ranks=ranks, dp=ranks // tp, tp=tp)


def tokens_of(options: Options) -> int:
    """The bytes that a step trains on."""
    return options.batch * options.context


def traffic(mesh: DeviceMesh) -> tuple[int, int]:
    """Collectives of this rank on the mesh so far, and the bytes that it gave to them."""
    counters = [group.statistics() for group in {*mesh.get_all_groups()}]
    return tuple(sum(c.get(name, 0) for c in counters) for name in ("operations", "bytes"))


def train_alone(text: Tensor, options: Options) -> list[float]:
    """Train on this process what all ranks trained together; return the losses.

    Floating-point sums depend on their order. To compare the two runs closely, the rows of each
    part of the batch are taken on their own, and gradients added up in the order of ranks.
    """
    model = build(options)
    optimizer = make_optimizer(model)
    losses: list[float] = []
    with Display("checking", options.steps, "tokens", tokens_of(options)) as display:
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


# --- the text ----------------------------------------------------------------------------------


def text_files(root: Path | None) -> list[Path]:
    """The files to train on, in the same order everywhere."""
    if root is None:
        return stdlib_files()
    if root.is_file():
        return [root]
    paths = sorted(root.rglob("*"))
    return [p for p in paths if p.is_file() and not hidden(p.relative_to(root).parts)]


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


class Batches:
    """Global batches: (batch, context + 1) token numbers, the same on every rank."""

    def __init__(self, text: Tensor, options: Options) -> None:
        self.text, self.options = text, options
        self.generator = torch.Generator().manual_seed(options.seed)
        self.window = torch.arange(options.context + 1)

    def draw(self) -> Tensor:
        """The next one."""
        ends, size = len(self.text) - self.options.context, (self.options.batch, 1)
        starts = torch.randint(ends, size, generator=self.generator)
        return self.text[starts + self.window].long()

    def state_dict(self) -> dict[str, Tensor]:
        """Where in the order of batches it is."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on there."""
        self.generator.set_state(state["generator"])


def batches(text: Tensor, options: Options) -> Iterator[Tensor]:
    """The batch of each step."""
    drawn = Batches(text, options)
    return (drawn.draw() for _ in range(options.steps))


# --- what the user can ask for ---------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """The flags, checked."""

    parallel: tuple[str, ...]
    steps: int
    ranks: int
    dp: int
    tp: int
    pp: int
    hook: str
    hook_rank: int
    seed: int
    batch: int
    context: int
    width: int
    layers: int
    text: Path | None
    capture: str | None
    resilient: bool
    kill: int | None
    check: bool


def ways(text: str) -> tuple[str, ...]:
    """The ways in ``ddp,tp``."""
    found = tuple(part.strip() for part in text.split(","))
    known = f"{', '.join(WAYS)}, or several like ddp,tp"
    for way in found:
        if way not in WAYS:
            raise argparse.ArgumentTypeError(f"expected {known}, got {text!r}")
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r} names one twice; expected {known}")
    if {"ddp", "fsdp"} <= {*found}:
        raise argparse.ArgumentTypeError(
            f"{text!r}: ddp and fsdp both share the batch; take ddp where each rank can hold the "
            f"whole model and its optimizer, else fsdp"
        )
    return found


def make_parser() -> Parser:
    """Every flag, with its default."""
    parser = Parser(description="Train a small GPT on bytes, on several processes.")
    count = whole_number(1)
    add = parser.add_argument
    add("--parallel", type=ways, help="ddp, fsdp, tp, pp or several (default: by --dp, --tp)")
    add("--ranks", type=count, help="processes (default: one for each core, but at least 4)")
    add("--dp", type=count, help="ranks that share the batch (default: ranks / tp)")
    add("--tp", type=count, help="ranks that share the model (default: 2 if ranks is 4, 8, …)")
    add("--pp", type=count, help="stages of the model (default: 2 with pp)")
    add("--steps", type=count, default=1400, help="training steps (default: %(default)s)")
    add("--hook", choices=HOOKS, default="all_reduce", help="how ddp reduces (%(default)s)")
    add("--hook-rank", type=count, default=4, help="of powersgd's factors (%(default)s)")
    add("--seed", type=whole_number(0), default=0, help="of all random numbers (%(default)s)")
    add("--batch", type=count, default=16, help="sequences in a step, all ranks (%(default)s)")
    add("--context", type=count, default=64, help="bytes in a sequence (%(default)s)")
    add("--width", type=count, default=128, help="numbers that stand for a byte (%(default)s)")
    add("--layers", type=count, default=2, help="blocks, one on another (%(default)s)")
    add("--text", type=Path, help="a file or folder to train on (default: Python's own library)")
    add(
        "--capture",
        nargs="?",
        const="python",
        choices=("python", "inductor"),
        help="record a step once, and run the record; compiled, if it says inductor",
    )
    add("--resilient", action="store_true", help="go on when ranks are killed")
    add("--kill", type=count, metavar="STEP", help="kill the last rank in this step, to see that")
    add("--check", action="store_true", help="train again on one process and compare the losses")
    return parser


def parse_options(parser: Parser) -> Options:
    """Read the command line; end the program with one clear message where it is wrong."""
    given = parser.parse_args()
    given.ranks = ranks_asked(parser, given.ranks)
    if given.width % HEAD_WIDTH:
        parser.error(f"--width {given.width} is not a multiple of {HEAD_WIDTH}")
    heads = given.width // HEAD_WIDTH
    check_ways(parser, given)
    set_mesh(given, heads)
    if given.pp * given.dp * given.tp != given.ranks:
        stages = f"--pp {given.pp} times " * (given.pp > 1)
        parser.error(
            f"{stages}--dp {given.dp} times --tp {given.tp} is not the number of ranks, "
            f"{given.ranks}"
        )
    check_stages(parser, given)
    if given.batch < given.dp:
        parser.error(
            f"--batch {given.batch} is less than one sequence for each of {given.dp} ranks: "
            f"use --batch {given.dp} or more, or fewer ranks"
        )
    if given.tp > heads:
        parser.error(
            f"--tp {given.tp} is more than the {heads} attention heads, one for "
            f"each {HEAD_WIDTH} of --width {given.width}"
        )
    if given.hook != "all_reduce" and "ddp" not in given.parallel:
        parser.error(
            f"--hook {given.hook} is for ddp, which averages gradients, "
            f"but --parallel is {','.join(given.parallel)}"
        )
    if given.capture and (given.resilient or given.hook == "powersgd"):
        parser.error("--capture records one kind of step: it goes without --resilient and powersgd")
    if given.kill is not None and not (given.resilient and given.ranks > 1):
        parser.error("--kill kills a rank: it needs --resilient, and another rank that goes on")
    return Options(**vars(given))


def check_ways(parser: Parser, given: argparse.Namespace) -> None:
    """End the program if ``--dp`` and ``--tp`` contradict ``--parallel``."""
    asked = given.parallel
    if asked and "tp" not in asked and (given.tp or 1) > 1:
        parser.error(
            f"--tp {given.tp} shares the model, but --parallel {','.join(asked)} does not: "
            f"--parallel {','.join(asked)},tp does both"
        )


def check_stages(parser: Parser, given: argparse.Namespace) -> None:
    """End the program if a pipeline is asked for that cannot be."""
    if "pp" not in given.parallel:
        if given.pp > 1:
            parser.error(f"--pp {given.pp} cuts the model into stages: --parallel pp,ddp does that")
        return
    if given.resilient or given.hook != "all_reduce":
        parser.error("--parallel pp goes without --resilient and --hook")
    if given.dp > 1 and not {"ddp", "fsdp"} & {*given.parallel}:
        parser.error(f"--dp {given.dp} shares the batch: --parallel pp,ddp or pp,fsdp does that")
    if given.layers < given.pp or given.batch < MICROBATCHES * given.dp:
        rows = MICROBATCHES * given.dp
        parser.error(f"--pp {given.pp} needs as many --layers, and --batch {rows} or more")


def set_mesh(given: argparse.Namespace, heads: int) -> None:
    """Complete the numbers of ranks and ``--parallel``, so that ranks = pp * dp * tp."""
    asked = given.parallel or ()
    given.pp = given.pp or (2 if "pp" in asked else 1)
    ranks = given.ranks
    if ranks is not None:
        given.ranks = max(1, ranks // given.pp)
    elif "pp" in asked and given.dp is given.tp is None:
        given.ranks = (2 if {"ddp", "fsdp"} & {*asked} else 1) * (2 if "tp" in asked else 1)
    set_replicas(given, heads)
    given.ranks = ranks or given.ranks * given.pp


def set_replicas(given: argparse.Namespace, heads: int) -> None:
    """Complete ``--ranks`` of a stage, ``--dp``, ``--tp`` and ``--parallel``."""
    ranks = given.ranks
    if ranks is None:
        if given.dp is None and given.tp is None:
            ranks = max(4, min(usable_cores(), given.batch))
        else:
            ways = given.parallel or ()
            shares = {"dp": 2 if {"ddp", "fsdp"} & {*ways} else 1, "tp": 2 if "tp" in ways else 1}
            ranks = (given.dp or shares["dp"]) * (given.tp or shares["tp"])
    if given.tp is None:
        given.tp = default_tp(given, ranks, heads)
    if given.dp is None:
        given.dp = max(1, ranks // given.tp)
    given.ranks = ranks
    if given.parallel is None:
        given.parallel = ("ddp",) * (given.dp > 1 or given.tp == 1) + ("tp",) * (given.tp > 1)


def default_tp(given: argparse.Namespace, ranks: int, heads: int) -> int:
    """The ranks that share the model where nobody says it; where possible they divide all ranks."""
    if given.parallel is not None and "tp" not in given.parallel:
        return 1
    if given.dp is not None:
        return max(1, ranks // int(given.dp))
    if given.parallel is None:  # two by two where that can be
        return 2 if ranks % 4 == 0 and heads > 1 else 1
    fitting = [n for n in range(2, heads + 1) if ranks % n == 0] or [1]
    return fitting[-1] if given.parallel == ("tp",) else fitting[0]


# --- what the user sees ------------------------------------------------------------------------


@torch.inference_mode()
def write(model: ByteGPT, options: Options, length: int = 400) -> str:
    """Let the model continue the prompt, byte by byte."""
    generator = torch.Generator().manual_seed(options.seed)
    written = list(PROMPT.encode())
    for _ in range(length):
        logits = model(torch.tensor([written[-options.context :]]))[0, -1]
        chances = torch.softmax(logits / 0.6, dim=-1)  # below 1: likely bytes become likelier
        written.append(int(torch.multinomial(chances, 1, generator=generator)))
    text = bytes(written).decode(errors="replace")
    # What it has learned so far may include control characters, which a terminal would obey.
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def report(text: Tensor, options: Options, trained: Trained) -> None:
    """On rank 0, when the others are done: the check, a sample, and the last line."""
    results: dict[str, str | float] = {
        "parallel": ",".join(options.parallel),
        "ranks": options.ranks,
        "dp": options.dp,
        "tp": options.tp,
        "pp": options.pp,
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


def main() -> None:
    """What each rank runs, and what starts the ranks."""
    parser = make_parser()
    options = parse_options(parser)
    try:
        text = load_text(options)
    except ValueError as error:
        parser.error(str(error))
    if "RANK" not in os.environ:
        launch_myself(options.ranks, ["--elastic", f"1:{options.ranks}"] * options.resilient)
    dist.init_process_group()
    if options.resilient:
        trained, options = train_resilient(text, options)
    else:
        trained = train(text, options)
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank == 0:
        report(text, options, trained)


if __name__ == "__main__":
    main()
