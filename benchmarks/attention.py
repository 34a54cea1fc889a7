"""Attention whose sequence is sharded: the ways, beside one process and a ring by hand on Gloo.

    python benchmarks/attention.py                        # 8,192 tokens on 2 ranks: a minute
    python benchmarks/attention.py --ranks 4 --tokens 4096 --json out.json

Each rank computes on one thread, forward and backward, causal. All ways take turns in the same
processes; one process has the whole sequence while the others wait. Compare ratios. On a busy
machine compare CPU seconds: those of the rank that has the most, which no neighbour lengthens.
"""

from __future__ import annotations

import argparse
import json
import resource
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from by_turns import Taken, by_turns, slowest
from plotting import add_plot_option, chart, draw
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import tilework.distributed as dist
from tilework.dtensor import (
    Shard,
    arange,
    context_parallel,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from tilework.testing import run_ranks

HEADS, DEPTH = 4, 64
ALONE, BY_HAND, WAYS = "one process", "by hand on Gloo", ("gather", "ring", "heads")
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Block(nn.Module):
    """A block of GPT: attention and a multilayer perceptron."""

    def __init__(self, attend: Callable[..., Tensor] = F.scaled_dot_product_attention) -> None:
        super().__init__()
        width = HEADS * DEPTH
        self.attend = attend
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        shape = (HEADS, DEPTH)
        q, k, v = (
            torch.unflatten(part(y), -1, shape).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        y = self.attend(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        result: Tensor = x + self.mlp(self.norms[1](x))
        return result


class HandWritten(torch.autograd.Function):
    """A ring as programs write it: each rank sends its block on, and joins by log-sum-exp."""

    group: Any = None

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        me = torch.distributed.get_rank()
        out, logs = _flash(q, k, v, 0.0, True)
        for number, (block, other) in enumerate(HandWritten.blocks(k, v)):
            if number + 1 > me:
                continue
            more, theirs = _flash(q, block, other, 0.0, False)
            joined = torch.logaddexp(logs, theirs)
            out = out * (logs - joined).exp().unsqueeze(-1)
            out = out + more * (theirs - joined).exp().unsqueeze(-1)
            logs = joined
        ctx.save_for_backward(q, k, v, out, logs)
        result: Tensor = out
        return result

    @staticmethod
    def blocks(k: Tensor, v: Tensor) -> Any:
        """The blocks of the other ranks, each while the one before is computed with."""
        pair = torch.stack([k, v])
        for _ in range(torch.distributed.get_world_size() - 1):
            pair = HandWritten.passed_on(pair)
            yield pair[0], pair[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, logs = ctx.saved_tensors
        me, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        of_q, *mine = _flash_backward(grad, q, k, v, out, logs, 0.0, True)
        travelling = torch.stack(mine)
        for number, (block, other) in enumerate(HandWritten.blocks(k, v)):
            travelling = HandWritten.passed_on(travelling)
            if number + 1 <= me:
                more, *theirs = _flash_backward(grad, q, block, other, out, logs, 0.0, False)
                of_q = of_q + more
                travelling = travelling + torch.stack(theirs)
        if size > 1:
            travelling = HandWritten.passed_on(travelling)
        return of_q, travelling[0], travelling[1]

    @staticmethod
    def passed_on(pair: Tensor) -> Tensor:
        """The pair of the rank before, for that of this rank."""
        me, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        came = torch.empty_like(pair)
        ops = [
            torch.distributed.P2POp(torch.distributed.isend, pair.contiguous(), (me + 1) % size),
            torch.distributed.P2POp(torch.distributed.irecv, came, (me - 1) % size),
        ]
        for work in torch.distributed.batch_isend_irecv(ops):
            work.wait()
        return came


def scene(rank: int, tokens: int, rounds: int, port: int) -> tuple[Taken, dict[int, int]]:
    """The times of each way on this rank; and the pairs of a query and a key, by turns."""
    ranks = dist.get_world_size()
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
    )
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    whole = torch.randn(1, tokens, HEADS * DEPTH)
    alone, model = Block(), distribute_module(Block(), mesh)
    by_hand = Block(lambda q, k, v, is_causal: HandWritten.apply(q, k, v))  # type: ignore[no-untyped-call]
    mine = whole.chunk(ranks, 1)[rank].clone()

    def by_way(way: Any, turns: int = 1) -> Callable[[], None]:
        part = distribute_tensor(whole, mesh, [Shard(1, turns=turns)])

        def run() -> None:
            with context_parallel(way):
                model(part).square().sum().backward()

        return run

    def by_myself() -> None:
        if rank == 0:
            alone(whole).square().sum().backward()

    def written() -> None:
        by_hand(mine).square().sum().backward()
        for parameter in by_hand.parameters():
            torch.distributed.all_reduce(parameter.grad)

    ways = {way: by_way(way) for way in WAYS} | {"ring, turns=2": by_way("ring", turns=2)}
    taken = by_turns({**ways, ALONE: by_myself, BY_HAND: written}, rounds)
    torch.distributed.destroy_process_group()
    pairs = {}
    for turns in (1, 2):
        rows = arange(tokens, device_mesh=mesh, placements=[Shard(0, turns=turns)]).to_local()
        pairs[turns] = int((rows + 1).sum())
    return taken, pairs


def peak(rank: int, tokens: int, way: Any) -> float:
    """The MiB by which a rank's memory grows in causal attention, forward."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = (1, 2, tokens, 32)
    parts = [distribute_tensor(torch.randn(sizes), mesh, [Shard(2)]) for _ in range(3)]
    with context_parallel(way):
        q, k, v = (part[:, :, :64] for part in parts)
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        q, k, v = parts
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, default=29611, help="for Gloo")
    parser.add_argument("--json", type=Path)
    add_plot_option(parser)
    options = parser.parse_args()
    found = run_ranks(
        options.ranks,
        lambda rank: scene(rank, options.tokens, options.rounds, options.port),
        kind="processes",
        timeout=timedelta(minutes=9),
    )
    seconds, used = (slowest([taken for taken, _ in found], kind) for kind in (0, 1))
    drawn = Table(title=f"a block of GPT, {options.tokens} tokens, {options.ranks} ranks")
    for name in ("way", "seconds", "of one process", "of by hand", "CPU", "of one", "of by hand"):
        drawn.add_column(name, justify="right")
    for name in seconds:
        drawn.add_row(
            name,
            *(
                f"{times[name] / times[other] if other else times[name]:.2f}"
                for times in (seconds, used)
                for other in ("", ALONE, BY_HAND)
            ),
        )
    Console().print(drawn)
    draw(options.plot, chart(drawn, ("seconds",)))
    for turns in (1, 2):
        pairs = [each[turns] for _, each in found]
        ratio = max(pairs) * len(pairs) / sum(pairs)
        print(f"turns={turns}: {ratio:.2f} times the mean of pairs on the rank with the most")
    peaks = {}
    for way in ("gather", "ring"):
        grown = run_ranks(4, lambda rank, way=way: peak(rank, 16384, way), kind="processes")
        peaks[way] = max(grown)
        print(f"{way}: {max(grown):.1f} MiB more on the rank with the most, 16,384 tokens, 4 ranks")
    if options.json:
        options.json.write_text(json.dumps({"seconds": seconds, "cpu": used, "mib": peaks}))


if __name__ == "__main__":
    main()
