"""Random programs of collectives, writes and views, captured with all passes, and as they are.

``python -m tests.capture.program.collective_programs --examples 2000`` runs many, and prints the
source of one that differs.
"""

from __future__ import annotations

import argparse
import linecache
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import tilework.distributed as dist
from tests.capture.twins import same_bits
from tilework.capture import capture
from tilework.capture.program import passes
from tilework.testing import run_ranks

#: Statements on x, y, z and the state s, of six elements, w of twelve, and h, a view of three.
STATEMENTS = [
    "dist.all_reduce(x)",
    "dist.all_reduce(y, dist.ReduceOp.MAX)",
    "dist.all_reduce(z)",
    "dist.all_reduce(s)",
    "dist.all_reduce(h)",
    "dist.all_reduce(x[:3]); dist.all_reduce(x[3:])",
    "dist.all_reduce(y.view(2, 3).t())",
    "dist.broadcast(y, 1)",
    "dist.all_gather_into_tensor(w, x)",
    "dist.reduce_scatter_tensor(z, w)",
    "dist.all_to_all_single(w, w.flip(0))",
    "q = z + 1; work = dist.all_reduce(q, async_op=True); y = y.cos(); work.wait(); z = q",
    "z = x * 2",
    "x = x + y",
    "y = torch.rand_like(y) + h.sum()",
    "z = torch.full_like(x, x.max().item())",
    "w = torch.cat([x, z])",
    "h = y[:3]",
    "h = x.view(2, 3)[1]",
    "h = s[1:4]",
    "h = torch.randn(3)",
    "h.mul_(0.5)",
    "y.add_(1)",
    "s.add_(x)",
    "x.view(2, 3).t().copy_(y.view(3, 2))",
    "torch.neg(x, out=z)",
    "torch._foreach_add_([x, y], 1.0)",
    "x.bernoulli_(0.5)",
    "x, y, z = z, x, y",
    "z = z.clone()",
    "if rank: z = x + 1",
    "if rank: y = y.flip(0)",
    "t = y.new_ones(()); dist.all_reduce(t); y = y + 1 if t > 1 else y",
]
_HEAD = "def step(x, y):\n    z, w, h = x - y, torch.cat([x, y]), y[3:]\n"


def source_of(chosen: Sequence[int]) -> str:
    """The source of a step of these statements."""
    lines = [f"    {STATEMENTS[i]}\n" for i in chosen]
    return "".join([_HEAD, *lines, "    return x * 1, y * 1, z * 1, w * 1, h * 1\n"])


def arguments(call: int, rank: int) -> tuple[Tensor, Tensor]:
    """The arguments of a call; in every third they share memory."""
    memory = torch.randn(15, generator=torch.Generator().manual_seed(2 * call + rank))
    return (memory[:6], memory[4:10]) if call % 3 == 2 else (memory[:6], memory[9:])


def outcome(source: str, rank: int, wrap: Callable[..., Any]) -> list[Tensor]:
    """Everything that some calls of a step return and write."""
    file = f"<collectives {abs(hash(source)):x}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    scope: dict[str, Any] = {"torch": torch, "dist": dist, "rank": rank, "s": torch.arange(6.0)}
    exec(compile(source, file, "exec"), scope)
    step, found = wrap(scope["step"]), []
    for call in range(7):
        torch.manual_seed(call)
        x, y = arguments(call, rank)
        found += [*step(x, y), x, y, scope["s"].clone()]
    return found


def difference(chosen: Sequence[int], ranks: int = 2) -> str | None:
    """The step, if it does something else when it is captured."""
    source = source_of(chosen)

    def runs(wrap: Callable[..., Any]) -> list[list[Tensor]]:
        return run_ranks(ranks, lambda rank: outcome(source, rank, wrap))

    try:
        plain = runs(lambda step: step)
    except RuntimeError:  # overlapping memory, which torch refuses
        return None
    captured = runs(lambda step: capture(step, check="never"))
    pairs = zip(chain(*plain), chain(*captured), strict=True)
    return None if all(same_bits(*pair) for pair in pairs) else source


programs = st.lists(st.integers(0, len(STATEMENTS) - 1), min_size=3, max_size=16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=200)
    checks = settings(
        max_examples=parser.parse_args().examples,
        suppress_health_check=list(HealthCheck),
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink],
    )

    @checks
    @given(programs)
    def tries(chosen: list[int]) -> None:
        wrong = difference(chosen)
        assert wrong is None, wrong

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "LEAST_BYTES", 0)
        patch.setattr(passes, "has_spare_core", lambda ranks: True)
        tries()


if __name__ == "__main__":
    main()
