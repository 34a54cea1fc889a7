"""Programs beyond the written limit: all ranks raise, or all have torch's values.

A program makes a tensor ``v0``, maybe a view ``v1`` of it, and something computed; does what
docs/concepts/limits.md refuses, or what torch leaves undefined; writes; and uses all of them.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any

import torch

from tests.fuzz.language import Run
from tests.fuzz.programs import difference, gradients, state_of
from tilework.comm.world import current_world
from tilework.mesh import init_device_mesh
from tilework.testing import run_ranks

_MAKES = (
    "v0 = leaf('v0', (4, 4), 1, {p})",
    "v9 = leaf('v9', (4, 4), 1, {p})\nv0 = v9 * 2",
    "v9 = leaf('v9', (4, 4), 1, {p})\nv0 = v9.exp()",
    "v8 = leaf('v8', (4, 4), 1, {p})\nv9 = v8 * 2\nv0 = v9[1:]",
    "v9 = data((4, 4), 1, {p})\nv0 = v9[:, 1:]",
)
_VIEWS = ("", "v1 = v0[0]", "v1 = v0.flatten()", "v1 = v0[:, 1:]", "v1 = v0.t()", "v1 = v0[1:, 0]")
_BETWEEN = ("", "v2 = v0 * v0", "v2 = v0.softmax(0)", "v0.requires_grad and v0.retain_grad()")
_BEYOND = (
    *("v0.data = v0.data * 2", "v0.data = v0.data.t()", "v0.data = data((4, 4), 7, {q})"),
    "v1.data = v1.data * 2",
    *("with torch.no_grad(): v0.t_()", "with torch.inference_mode(): v0.unsqueeze_(0)"),
    *("v0.t_()", "v1.squeeze_()", "v0.mul_(3)", "v0.data.mul_(3)", "v0[0] = 0.5"),
    *("with torch.inference_mode(): v0.mul_(3)", "with torch.no_grad(): v0.add_(1.0)"),
    "v0.data = data((4, 6), 7, {q})",
    "with torch.no_grad(): torch.sum(v0, 0, out=v0)",
)
_AFTER = ("", "v0.mul_(3)", "with torch.no_grad(): v0.mul_(3)", "v1.mul_(2)", "v1.data.mul_(2)")
_LAST = ("v3 = v0 * 3", "v3 = v1 * 2", "v3 = v1 * v1\nv4 = v0 * 2")


@dataclass
class Beyond:
    """A program beyond the limit.

    Args:
        statements: Its statements; torch takes all of them.
        mesh: The shape of the mesh.
        expected: The values that torch gives.
        ways: The gradients that torch gives, and those that it would give had operators kept
            copies; empty where it refuses both backward passes.
    """

    statements: Sequence[str]
    mesh: tuple[int, ...]
    expected: dict[str, Any]
    ways: Sequence[dict[str, Any]]


def made(number: int, mesh: tuple[int, ...]) -> Beyond:
    """The program of a number."""
    rng = random.Random(number)
    while True:
        parts = [rng.choice(each) for each in (_MAKES, _VIEWS, _BETWEEN)]
        parts += [rng.choice(_BEYOND) for _ in range(rng.randint(1, 2))]
        parts += [rng.choice(_AFTER), rng.choice(_LAST)]
        words = {
            name: repr(" ".join(rng.choice(("R", "P", "S0", "S1")) for _ in mesh)) for name in "pq"
        }
        lines = [line for part in parts for line in part.format(**words).splitlines() if line]
        try:
            run, ways = _plain(lines), []
        except Exception:
            continue
        for hooks in (None, (torch.clone, lambda kept: kept)):
            try:
                ways.append(_plain_gradients(lines, hooks))
            except Exception:
                continue
        return Beyond(lines, mesh, state_of(run), ways)


def _plain(lines: Sequence[str]) -> Run:
    run = Run()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for text in lines:
            run.execute(text)
    return run


def _plain_gradients(lines: Sequence[str], hooks: Any) -> dict[str, Any]:
    with torch.autograd.graph.saved_tensors_hooks(*hooks or (lambda x: x, lambda x: x)):
        run = _plain(lines)
    if hooks is None:
        run = _plain(lines)
    run.backward()
    return gradients(run)


def wrong(programs: Sequence[Beyond]) -> Iterator[str]:
    """What went wrong, for each program that did."""
    for program in programs:
        said = run_ranks(prod(program.mesh), lambda rank, each=program: _run(each))
        if len(set(said)) > 1 or said[0].startswith("wrong"):
            yield "\n".join([*program.statements, f"mesh {program.mesh}", *said])


def _run(program: Beyond) -> str:
    """What a rank saw: "right", "wrong: …", or the statement at which it raised, and the error."""
    torch.set_num_threads(1)
    run = Run(init_device_mesh("cpu", program.mesh))
    for group in current_world().records:
        group.set_timeout(timedelta(seconds=180))
    for number, text in enumerate([*program.statements, "backward"]):
        try:
            if text != "backward":
                run.execute(text)
                continue
            state = state_of(run)
            expected = {
                name: value
                for name, value in program.expected.items()
                if name.partition(".")[0] not in run.stale
            }
            differing = difference(state, expected)
            if differing:
                return f"wrong: {differing}"
            run.backward()
        except Exception as error:
            if "Timeout" in type(error).__name__ or "Lost" in type(error).__name__:
                return f"wrong: {error}"
            return f"raised at {number}: {type(error).__name__}"
    seen = gradients(run)
    differences = [difference(seen, way) for way in program.ways]
    return f"wrong: {differences[0]}" if differences and all(differences) else "right"
