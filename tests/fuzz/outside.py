"""Programs beyond the written limit: all ranks raise, or all have torch's values.

A program makes a tensor ``v0``, maybe a view ``v1`` of it, and something computed; gives it other
data, or does what else docs/concepts/limits.md refuses in some layouts, or torch leaves undefined;
writes to one of them; and uses all.
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
from tests.fuzz.programs import difference, gradients, in_date, state_of
from tilework.comm.world import current_world
from tilework.mesh import init_device_mesh
from tilework.testing import run_ranks

_MAKES = (
    *("v0 = leaf('v0', (4, 4), 1, {p})", "v0 = data((4, 4), 1, {p})"),
    "v9 = leaf('v9', (4, 4), 1, {p})\nv0 = v9 * 2",
    "v9 = leaf('v9', (4, 4), 1, {p})\nv0 = v9.exp()",
    "v8 = leaf('v8', (4, 4), 1, {p})\nv9 = v8 * 2\nv0 = v9[1:]",
    *(f"v9 = data((4, 4), 1, {{p}})\nv0 = v9{view}" for view in ("[:, 1:]", ".t()", ".flatten()")),
    "v9 = leaf('v9', (4, 4), 1, {p})\nv0 = v9.detach()",
)
_VIEWS = (
    *("", "v1 = v0[0]", "v1 = v0.flatten()", "v1 = v0[:, 1:]", "v1 = v0.t()", "v1 = v0[1:, 0]"),
    *("v1 = v0.detach().t()", "v1 = v0.data[1:]", "v1 = v0.detach().reshape(-1)"),
)
_BETWEEN = ("", "v2 = v0 * v0", "v2 = v0.softmax(0)", "v0.requires_grad and v0.retain_grad()")
#: Of other data: parts, turned and copied, of the tensor itself and of another one.
_FORMS = (
    *("{of}.data * 2", "{of}.data.clone()", "{of}.data.t()", "{of}.data[1:]", "{of}.data.flip(0)"),
    *("{of}.data[0]", "{of}.data.reshape(-1)", "{of}.data.unsqueeze(0)", "{of}.data.chunk(2)[1]"),
    *("{of}.detach()", "{of}.data.t()[1:]", "{of}.data[None].expand(2, *[-1] * {of}.dim())"),
    *("{of}.data.flatten()[1:5].view(2, 2)", "moved({of}.data, {q})", "data((4, 6), 7, {q})"),
)
_BEYOND = (
    *("{gives}",) * 6,
    *("v0.data, v7.data = v7.data, v0.data", "v1.data = v1.data * 2", "v7.data = v0.data"),
    *("with torch.no_grad(): v0.t_()", "with torch.inference_mode(): v0.unsqueeze_(0)"),
    *("v0.t_()", "v1.squeeze_()", "v0.mul_(3)", "v0.data.mul_(3)", "v0[0] = 0.5"),
    *("with torch.inference_mode(): v0.mul_(3)", "with torch.no_grad(): v0.add_(1.0)"),
    "with torch.no_grad(): torch.sum(v0, 0, out=v0)",
    "descend(v0 * v0)\ntorch.optim.SGD([v0], 0.1, momentum=0.5).step()",
)
_GIVES = (
    *("v0.data = {form}", "v0.data = {form}", "with torch.no_grad(): v0.data = {form}"),
    "with torch.no_grad(): v0.set_({form})",
)
_AFTER = (
    *("", "v0.mul_(3)", "with torch.no_grad(): v0.mul_(3)", "v1.mul_(2)", "v1.data.mul_(2)"),
    *("v7.data[1].mul_(3)", "write_local(v7.detach(), 3.0)", "write_local(v0.detach(), 3.0)"),
    *("v9.detach()[1:].mul_(3)", "v1.detach()[0].mul_(3)"),
)
_LAST = (
    *("v3 = v0 * 3", "v3 = v1 * 2", "v3 = v1 * v1\nv4 = v0 * 2", "v3 = v7 * 2\nv4 = v0[:1] * 2"),
    "v3 = copied(v0)",
)


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
        form = rng.choice(_FORMS).replace("{of}", rng.choice(("v0", "v0", "v7")))
        gives = rng.choice(_GIVES).replace("{form}", form)
        beyond = [rng.choice(_BEYOND) for _ in range(rng.randint(1, 2))]
        parts += [each.replace("{gives}", gives) for each in beyond]
        parts += [rng.choice(_AFTER), rng.choice(_LAST)]
        if any("v7" in part for part in parts):
            parts.insert(1, "v7 = data((4, 4), 7, {q})")
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
            differing = difference(state, in_date(run, program.expected))
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
