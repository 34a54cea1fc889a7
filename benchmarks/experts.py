"""A mixture of experts: ExpertParallel beside a dispatch by hand on Gloo.

    python benchmarks/experts.py                        # 2 ranks, half a minute
    python benchmarks/experts.py --ranks 4 --rows 2048 --json out.json

Each rank computes on one thread, forward and backward, on its own rows. Both ways have the same
weights and rows, take turns in the same processes, and give the same output. Compare ratios; on a
busy machine those of CPU seconds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from by_turns import Taken, by_turns, slowest
from plotting import Chart, add_plot_option, draw
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional as F

import tilework.distributed as dist
from tilework.mesh import init_device_mesh
from tilework.parallel import ExpertParallel, parallelize_module
from tilework.testing import run_ranks

FEATURES, INNER, EXPERTS, TOP = 256, 512, 8, 2


class Experts(nn.Module):
    """A stack of experts, each two linear layers."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, INNER, FEATURES) / FEATURES**0.5)
        self.down = nn.Parameter(torch.randn(experts, FEATURES, INNER) / INNER**0.5)

    def forward(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(rows)
        for expert in range(len(self.up)):
            row, place = torch.where(experts == expert)
            made = F.linear(F.relu(F.linear(rows[row], self.up[expert])), self.down[expert])
            result = result.index_add(0, row, made * weights[row, place, None])
        return result


def by_hand(local: Experts, rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Sort, exchange counts and rows, compute, exchange back, as programs on Gloo write it."""
    size = torch.distributed.get_world_size()
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=EXPERTS)
    theirs = torch.empty_like(counts)
    torch.distributed.all_to_all_single(theirs, counts)
    outgoing = counts.view(size, -1).sum(1).tolist()
    incoming = theirs.view(size, -1).sum(1).tolist()
    world: Any = torch.distributed.group.WORLD
    taken = all_to_all_single_autograd(rows[order // TOP], incoming, outgoing, world)
    numbers = torch.arange(EXPERTS // size).repeat(size).repeat_interleave(theirs)
    made = local(taken, numbers[:, None], taken.new_ones(len(taken), 1))
    back = all_to_all_single_autograd(made, outgoing, incoming, world)
    shares = back * weights.flatten()[order, None]
    return torch.zeros_like(rows).index_add(0, order // TOP, shares)


def scene(rank: int, count: int, rounds: int, port: int) -> Taken:
    """The seconds and the CPU seconds of each way, in each round."""
    torch.set_num_threads(1)
    size = dist.get_world_size()
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", address, rank=rank, world_size=size)
    torch.manual_seed(0)
    whole = Experts(EXPERTS)
    local = Experts(EXPERTS // size)
    for mine, full in zip(local.parameters(), whole.parameters(), strict=True):
        mine.data = full.data.chunk(size)[rank].clone()
    experts = parallelize_module(whole, init_device_mesh("cpu", (size,)), ExpertParallel())
    torch.manual_seed(rank)
    rows = torch.randn(count, FEATURES, requires_grad=True)
    weights, ids = torch.randn(count, EXPERTS).softmax(-1).topk(TOP, dim=-1)
    ways: dict[str, Callable[..., Tensor]] = {
        "ExpertParallel": experts,
        "by hand on Gloo": lambda *given: by_hand(local, *given),
    }
    torch.testing.assert_close(*(way(rows, ids, weights) for way in ways.values()))

    def run(way: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.backward(way(rows, ids, weights).square().sum())

    taken = by_turns({name: run(way) for name, way in ways.items()}, rounds)
    torch.distributed.destroy_process_group()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=4096, help="of each rank")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--port", type=int, default=29612, help="for Gloo")
    parser.add_argument("--json", type=Path)
    add_plot_option(parser)
    options = parser.parse_args()
    by_rank = run_ranks(
        options.ranks,
        lambda rank: scene(rank, options.rows, options.rounds, options.port),
        kind="processes",
        timeout=timedelta(minutes=5),
    )
    found: dict[str, Any] = {}
    for kind, what in enumerate(("seconds", "CPU seconds of the rank with most")):
        times = slowest(by_rank, kind)
        ours, other = times.values()
        print(f"{what}: {ours:.4f}, by hand on Gloo {other:.4f}: {other / ours:.2f} times as much")
        found[what] = times
    draw(options.plot, Chart("Experts: seconds", list(found.items())))
    if options.json:
        options.json.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
