"""Compressed gradients on examples/byte_gpt.py: the bytes of a step, and the loss that is reached.

    python benchmarks/powersgd.py              # two ranks, 400 steps with each hook: some minutes
    python benchmarks/powersgd.py --ranks 4 --steps 100

Every run has the same weights and batches at first; only how gradients are averaged differs. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from plotting import add_plot_option, chart, draw
from rich.console import Console
from rich.table import Table

EXAMPLE = Path(__file__).parents[1] / "examples" / "byte_gpt.py"
#: By their names in the table: flags of the example.
HOOKS = {
    "all_reduce": "--hook all_reduce",
    "bf16": "--hook bf16",
    "powersgd, rank 1": "--hook powersgd --hook-rank 1",
    "powersgd, rank 4": "--hook powersgd --hook-rank 4",
    "powersgd, rank 16": "--hook powersgd --hook-rank 16",
}


def measure(flags: str, given: argparse.Namespace) -> dict[str, Any]:
    """The results of one training."""
    sizes = f"--parallel ddp --ranks {given.ranks} --steps {given.steps}"
    command = [sys.executable, str(EXAMPLE), *sizes.split(), *flags.split()]
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, env=kept, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Train with each hook, and print a table."""
    parser = argparse.ArgumentParser(description="Bytes and losses with communication hooks.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    add_plot_option(parser)
    given = parser.parse_args()
    results = {name: measure(flags, given) for name, flags in HOOKS.items()}
    plain = results["all_reduce"]
    table = Table(title=f"byte_gpt, {given.ranks} ranks, {given.steps} steps")
    for name in ("hook", "MB a step", "times fewer", "last loss", "tokens/s"):
        table.add_column(name, justify="left" if name == "hook" else "right")
    for name, result in results.items():
        table.add_row(
            name,
            f"{result['mb_per_step']:.3f}",
            f"{plain['mb_per_step'] / result['mb_per_step']:.1f}",
            f"{result['loss_last']:.3f}",
            f"{result['tokens_per_s']:,}",
        )
    Console().print(table)
    draw(given.plot, *[chart(table, (name,)) for name in ("MB a step", "last loss", "tokens/s")])
    print(json.dumps(results))


if __name__ == "__main__":
    main()
