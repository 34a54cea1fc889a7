"""Four things that torch does not show, on the small GPT of byte_gpt.py, within a minute.

    make demo                                 # or: tilework run -n 4 examples/demo.py
    python examples/demo.py --steps 400       # the script launches itself; flags are byte_gpt.py's

1. The loss of several ranks is that of one process.
2. A step that is recorded once and run as one program gives the same losses, bit for bit.
3. A tensor's layout can be drawn: which rank holds which part.
4. Ranks that call different operations are told at once who called what, and where.

Each is checked as it is shown: the program fails where a statement does not hold.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace

import torch
from byte_gpt import (
    EARLY_STEPS,
    Options,
    Trained,
    build,
    in_parallel,
    load_text,
    make_parser,
    parse_options,
    train,
    train_alone,
)
from common import Parser, launch_myself

import tilework.distributed as dist
from tilework.dtensor import DTensor, show
from tilework.mesh import init_device_mesh

#: Three trainings of so many steps take half a minute on two cores.
STEPS = 80
#: Floating-point sums in another order: see "What --check compares" in README.md.
CLOSE = 1e-4


def state(number: int, text: str, holds: bool) -> None:
    """Print a statement; end the program where it does not hold."""
    print(f"\n{number}. {text}", flush=True)
    if not holds:
        raise SystemExit(f"statement {number} does not hold")


def read_options(parser: Parser) -> Options:
    """byte_gpt.py's flags, without those that train in another way."""
    parser.description = "Train a small GPT on several processes, and show four things about it."
    parser.set_defaults(steps=STEPS)
    options = parse_options(parser)
    if options.ranks < 2:
        parser.error("--ranks 1: one rank has nobody to differ from; use 2 or more")
    if options.resilient or options.capture or options.hook != "all_reduce":
        parser.error("--resilient, --capture and --hook are for examples/byte_gpt.py")
    return options


def layout(options: Options) -> DTensor:
    """A weight of the model where ``dp`` and ``tp`` both shard. Collective."""
    sharded = replace(options, parallel=("fsdp", "tp"))
    mesh = init_device_mesh("cpu", (options.dp, options.tp), mesh_dim_names=("dp", "tp"))
    weight = in_parallel(build(options), sharded, mesh).get_parameter("blocks.0.up.weight")
    assert isinstance(weight, DTensor)
    return weight


def mismatch() -> tuple[str, float]:
    """The error where rank 1 calls another operation, and the seconds until all have it.

    Collective. The error is empty where a rank has none.
    """
    group, tensor = dist.new_group(), torch.ones(4)
    error = ""
    dist.barrier()
    begun = time.perf_counter()
    try:
        if dist.get_rank() == 1:
            dist.broadcast(tensor, src=0, group=group)
        else:
            dist.all_reduce(tensor, group=group)
    except dist.CollectiveMismatchError as raised:
        error = str(raised)
    errors = [""] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    return error if all(errors) else "", time.perf_counter() - begun


def largest_difference(trained: Trained, text: torch.Tensor, options: Options) -> float:
    """Between the early losses of the ranks and those of one process, relative to the latter."""
    pairs = list(zip(trained.losses, train_alone(text, options), strict=True))[:EARLY_STEPS]
    return max(abs(ours - alone) / alone for ours, alone in pairs)


def main() -> None:
    """What each rank runs, and what starts the ranks."""
    parser = make_parser()
    options = read_options(parser)
    try:
        text = load_text(options)
    except ValueError as error:
        parser.error(str(error))
    if "RANK" not in os.environ:
        launch_myself(options.ranks)
    dist.init_process_group()
    trained = train(text, options)
    captured = train(text, replace(options, capture="python"))
    weight = layout(options)
    told, seconds = mismatch()
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank:
        return
    apart = largest_difference(trained, text, options)
    equal = f"The loss of {options.ranks} ranks is the loss of one process, within {apart:.0e}"
    state(1, f"{equal} of it in the first {EARLY_STEPS} steps", apart < CLOSE)
    same = captured.losses == trained.losses
    state(2, f"A captured step, run as one program: {options.steps} losses, equal to the bit", same)
    shared = weight.to_local().numel() < weight.numel()
    state(3, "Which rank holds which part of a weight:", shared)
    show(weight)
    state(
        4,
        f"Rank 1 calls another operation; {1000 * seconds:.0f} ms later all have raised:",
        bool(told),
    )
    print(told)
    print("\nexamples/byte_gpt.py trains longer, and writes text.")


if __name__ == "__main__":
    main()
