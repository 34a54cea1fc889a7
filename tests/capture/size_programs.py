"""Random programs whose Python looks at sizes, captured and as they are, at sizes in any order.

A program is a chain of statements on rows of a tensor: slices, pads, branches, scales, views,
repeats, ranges and tables, with integers that are expressions of sizes. ``python -m
tests.capture.size_programs --examples 2000`` runs many, and prints the source of those that differ.
"""

from __future__ import annotations

import argparse
import linecache
import math
import re
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.capture.ordinary.running import difference, kept
from tilework.capture import capture
from tilework.errors import CaptureError

TABLE = {n: 1 / n for n in (2, 3, 5, 8, 12)}
#: Ways to read the count of rows of x (n), of its columns (m), and of the rows of y (k).
ROWS = ["len(x)", "x.shape[0]", "x.size(0)", "x.numel() // x.shape[1]", "x.size(-2)", "n"]
OTHERS = ["x.shape[1]", "x.size(-1)", "len(y)", "y.shape[0]", "sum(x.shape)", "max(x.shape)", "k"]
#: Expressions of the integers a and b, and of a number of the program, c.
INTEGERS = [
    "{a}", "{a}", "{a} + {c}", "{a} - {c}", "{a} * 2", "{a} // {c}", "{a} % {c}", "-{a} % {c}",
    "min({a}, {c})", "max({a}, {c})", "abs({a} - {b})", "({a} + {b}) // 2", "-(-{a} // {c}) * {c}",
    "math.isqrt({a})", "math.ceil({a} / {c})", "int(math.log2({a}))", "round({a} / {c})",
    "{a} if {a} > {c} else {b}", "1 << ({a} - 1).bit_length()", "int({a} ** 0.5)",
    "divmod({a}, {c})[1]", "int(f'{{{a}}}')", "{a} & {c}", "{a} ^ 1", "len(range(0, {a}, {c}))",
    "next(s for s in (8, 16, 64, 4096) if s >= {a})", "sorted([{a}, {c}, {b}])[1]", "hash({a})",
    "{a}.__index__()", "len(str({a}))", "sum(i % 2 for i in range({a}))", "min(x.shape)",
]  # fmt: skip
TESTS = [
    "{a} > {c}", "{a} % 2", "{a} == {b}", "{a} <= {b}", "{a} in (4, 7, 8, 12)", "{c} < {a} < 13",
    "{a} == 7 or {b} == 5", "not {a} % {c}", "x.shape == y.shape", "len(x) == len(y)",
    'f"{{{a}}}".endswith("3")', "{a} not in {{3: 1, 9: 2}}", "x.shape[0] == x.shape[1]",
    "bool({a} // {c})", "x.shape[:1] == y.shape[:1]", "x.size() != y.size()", "{a} is None",
    "math.gcd({a}, 6) == 1", "tuple(x.shape) > (8, 3)", "all(s > {c} for s in x.shape)",
    "self.last >= {a}", "{a} > self.most",
]  # fmt: skip
#: Statements; i and j are integers, t a test, c a number from 1 to 9. Rows are never none.
STATEMENTS = [
    "x = x[:{i}] if x[:{i}].numel() else x + 1",
    "x = x[-({i}):] if len(x[-({i}):]) else x",
    "x = x[{i} % len(x):]",
    "x = x[:, :max(1, {i} % x.size(1))]",
    "x = x[::max(1, {i} % 4)]",
    "x = x if {t} else x[:{c}]",
    "x = x * 2 if {t} else x + 1",
    "if {t}:\n        x = torch.cat([x, x[-1:]])",
    "if {t}:\n        x = x + y.sum()\n    else:\n        x = x.relu()",
    "x = F.pad(x, (0, 0, 0, max(0, {i}) % 40))",
    "x = F.pad(x, (0, 0, 0, -len(x) % {c}))",
    "x = x * ({i})",
    "x = x / (1 + abs({i}))",
    "x = x * len(x) ** -0.5",
    "x = x + math.log(len(x))",
    "x = x + torch.arange(x.shape[0])[:, None]",
    "x = x + torch.arange(0, x.size(1)) * ({i})",
    "x = x + torch.linspace(0, 1, x.shape[0])[:, None]",
    "x = x.repeat(1 + abs({i}) % 3, 1)",
    "x = x.expand(2, *x.shape).reshape(-1, x.shape[-1])",
    "x = x.view(-1, 2, x.shape[1]).mean(1) if len(x) % 2 == 0 else x",
    "x = x.reshape(x.shape[1], x.shape[0]).mT",
    "x = torch.cat([p.mean(0, keepdim=True) for p in x.split({c})])",
    "x = torch.stack([p.sum(0) for p in x.chunk({c})])",
    "x = torch.stack([x[s:s + {c}].sum(0) for s in range(0, len(x), {c})])",
    "for s, size in enumerate(x.shape):\n        x = x + s * size",
    "for size, other in zip(x.shape, y.shape):\n        x = x * (size - other)",
    "for _ in range(abs({i}) % 4):\n        x = x.sin()",
    "b, d = x.shape\n    x = x.flatten().view(b, d) * (b - d)",
    "x = x.new_full((len(x), x.shape[1]), {i}) + x",
    "x = x.tril({i} - {c})",
    "x = x.roll({i}, 0)",
    "x = x.narrow(0, 0, 1 + ({i}) % len(x))",
    "x = x.topk(1 + abs({i}) % len(x), 0).values",
    "x = x.index_select(0, torch.tensor([0, len(x) - 1]))",
    "x = x.cumsum(0)[({i}) % len(x)][None]",
    "x = F.avg_pool1d(x.T[None], 1 + ({i}) % min(3, len(x)))[0].T",
    "x = F.interpolate(x[None, None], size=(1 + abs({i}) % 9, x.size(1)))[0, 0]",
    "x = F.scaled_dot_product_attention(*[x[None]] * 3, is_causal={t} and True)[0]",
    "x = x * TABLE.get({i}, 0.5)",
    "x = x * [1.0, 2.0, 3.0][({i}) % 3]",
    "x = x @ torch.eye(x.size(1)) + x.mean() * x.numel()",
    "x = torch.where(torch.arange(len(x))[:, None] < {i}, x, -x)",
    "y = y[:len(x)] if len(y) > len(x) else F.pad(y, (0, 0, 0, len(x) - len(y)))",
    "x = x + y[:1, :1] if {t} else x - y[-1:, :1]",
    "self.last = {i}",
    "x = x + torch.ones(x.shape).cumsum(0) / x.shape.numel()",
    "x = x + torch.full_like(x, {i})",
    "x = x.unflatten(0, (-1, {c})).sum(1) if not len(x) % {c} else x",
    "assert len(x) > 0, f'{x.shape} has no rows'",
]  # fmt: skip


@dataclass(frozen=True)
class SizeProgram:
    """The source of a step, and the sizes of x and y in each call."""

    source: str
    sizes: list[tuple[int, int]]
    trains: bool


@st.composite
def integers(draw: Any, plain: bool = False) -> str:
    text: str = "{a}" if plain else draw(st.sampled_from(INTEGERS))
    a, b = draw(st.sampled_from(ROWS)), draw(st.sampled_from(ROWS + OTHERS))
    return f"({text.format(a=f'({a})', b=f'({b})', c=draw(st.integers(2, 9)))})"


@st.composite
def statements(draw: Any) -> str:
    text: str = draw(st.sampled_from(STATEMENTS))
    a, b = draw(integers(plain=draw(st.booleans()))), draw(integers(plain=True))
    test = draw(st.sampled_from(TESTS)).format(a=a, b=b, c=draw(st.integers(2, 9)))
    fills = {"{i}": draw(integers()), "{t}": f"({test})", "{c}": str(draw(st.integers(2, 5)))}
    for mark, fill in fills.items():
        text = text.replace(mark, fill)
    return text


@st.composite
def size_programs(draw: Any) -> SizeProgram:
    """Draw a program: one to five statements, and ten calls of few or many sizes."""
    body = draw(st.lists(statements(), min_size=1, max_size=5))
    lines = ["def step(x, y):", "n, k = x.shape[0], y.shape[0]", "x = x @ self.weight", *body]
    trains = draw(st.booleans())
    if trains:
        lines += ["loss = x.square().mean()", "self.weight.grad = None", "loss.backward()"]
    lines.append("return loss.detach(), x.shape[0]" if trains else "return x, len(x), y")
    rows = st.integers(2, 24) if draw(st.booleans()) else st.sampled_from([3, 7, 8, 12])
    sizes = draw(st.lists(st.tuples(rows, st.integers(2, 9)), min_size=10, max_size=10))
    if draw(st.booleans()):
        sizes = [(n, 5) for n, _ in sizes]
    return SizeProgram("\n    ".join(lines), [sizes[0], *sizes], trains)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.weight = torch.nn.Parameter(torch.randn(5, 5))
        self.last, self.most = 0, 8


def made(program: SizeProgram) -> tuple[Model, Any]:
    """The model and the step of a program, which has a name of its own for tracebacks."""
    model, name = Model(), f"<size program {abs(hash(program.source))}>"
    names: dict[str, Any] = {"torch": torch, "F": F, "math": math, "TABLE": TABLE, "self": model}
    exec(compile(program.source, name, "exec"), names)
    linecache.cache[name] = len(program.source), None, program.source.splitlines(True), name
    return model, names["step"]


def results(model: Model, step: Any, trains: bool, n: int, k: int) -> list[Any]:
    """Results of a call, the gradient and the attribute that it leaves."""
    generator = torch.Generator().manual_seed(100 * n + k)
    x, y = torch.randn(n, 5, generator=generator), torch.randn(k, 5, generator=generator)
    with torch.set_grad_enabled(trains):
        return [kept(step(x, y)), *kept([model.weight.grad, model.last])]


def judged(program: SizeProgram, backend: str = "python") -> tuple[str, str]:
    """Run a program in both ways: "equal", "WRONG", "error", "refused" or "invalid", and why.

    Sizes with which the program itself raises are left out.
    """
    plain, program_itself = made(program)
    model, step = made(program)
    fast, count = capture(step, backend=backend), 0
    for n, k in program.sizes:
        before = plain.last
        try:
            expected = results(plain, program_itself, program.trains, n, k)
        except Exception:
            plain.last = before
            continue
        count += 1
        try:
            found = results(model, fast, program.trains, n, k)
        except CaptureError as error:
            return "refused", str(error)
        except Exception as error:
            return "error", f"sizes {n} and {k}, call {count}: {type(error).__name__}: {error}"
        if text := difference(expected, found, exact=backend == "python"):
            return "WRONG", f"sizes {n} and {k}, call {count}: {text}"
    return ("equal", "") if count > 3 else ("invalid", "")


def main() -> int:
    """Run as many programs as the command line says; the status is 1 if any is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.capture.size_programs")
    parser.add_argument("--examples", type=int, default=2000)
    parser.add_argument("--backend", default="python", choices=["python", "inductor"])
    parser.add_argument("--show", type=int, default=20, help="so many programs that are wrong")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    refusals: Counter[str] = Counter()

    @settings(
        max_examples=options.examples,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(size_programs())
    def every(program: SizeProgram) -> None:
        kind, text = judged(program, options.backend)
        counts[kind] += 1
        if kind == "refused":
            refusals[re.sub(r"[\d(].*", "", text.split(" at <")[0])[:100]] += 1
        if kind in ("WRONG", "error") and counts["WRONG"] + counts["error"] <= options.show:
            print(f"--- {kind}: {text}\n{program.source}", flush=True)

    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        every()
    print(dict(counts))
    for text, count in refusals.most_common(15):
        print(f"refused {count:5}: {text}")
    return int(counts["WRONG"] + counts["error"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
