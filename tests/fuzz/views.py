"""Programs with views, of what is then written to in ways that torch counts and in others.

A program makes a tensor ``v0``, a view ``v1`` of it and a view ``v2`` of one of the two; computes
from them, hooks their gradients or asks for their nodes; writes; and looks at all of them again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import count

from tests.fuzz.programs import Program, expect, is_said

_SHAPES = ((4, 4), (5, 3), (2, 3, 4), (6, 4), (1, 4), (3, 1, 2), (2, 2))
_MAKES = (
    *("v9 = leaf('v9', {s}, 1, {p})\nv0 = v9 * 2", "v9 = leaf('v9', {s}, 1, {p})\nv0 = v9 + 0.25"),
    *("v0 = leaf('v0', {s}, 1, {p})", "v0 = data({s}, 1, {p})"),
    *(
        "v9 = leaf('v9', {s}, 1, {p})\nv0 = v9.detach()",
        "v9 = leaf('v9', {s}, 1, {p})\nv0 = v9[1:]",
    ),
    "v9 = leaf('v9', {s}, 1, {p})\nv0 = (v9 * 2).t()",
    "v9 = leaf('v9', {s}, 1, {p})\nv0 = v9.exp()",
)
_VIEWS = (
    *("{of}[0]", "{of}[-1]", "{of}[1:]", "{of}[::2]", "{of}[..., 0]", "{of}[..., 1:]"),
    *("{of}.transpose(0, -1)", "{of}.flatten()", "{of}.reshape(-1)", "{of}.view(-1)"),
    *("{of}.unsqueeze(0)", "{of}.squeeze()", "{of}[None].expand(2, *[-1] * {of}.dim())"),
    *("{of}.diagonal()", "{of}.unbind(0)[0]", "{of}.chunk(2, -1)[0]", "{of}.movedim(0, -1)"),
    *("{of}.unflatten(0, (-1, 1))", "{of}.reshape(2, -1)", "{of}.view(-1, 2)", "{of}[:]"),
    *("{of}.unfold(0, 2, 1)", "{of}.view_as({of})"),
    *("{of}[None].expand(2, *[-1] * {of}.dim()).reshape(1, 2, *{of}.shape)", "{of}[1:1]"),
)
_SEES = (
    *("", "v{n} = {x} * {x}", "v{n} = {x}.mean()", "v{n} = {x} * 3", "v{n} = {x}.exp()"),
    *("watch({x}, '{x}{n}')", "keep({x}, '{x}')", "n{n} = {x}.grad_fn", "v{n} = {x}[:1] * 2"),
    *("v{n} = own({x})", "v{n} = {x}.detach()[:1]", "v{n} = {x} + {y}.sum()"),
)
_ENDS = (
    *("", "v{n} = {x} * {x}", "watch({x}, '{x}{n}')", "keep({x}, '{x}')", "v{n} = {x}.mean()"),
    *("v{n} = gradient({x} * {x}, {y})", "v{n} = gradient({x}.sum() * {y}.sum(), {x})"),
    *("v{n} = {x}[:1]", "v{n} = {x} * {y}.sum()", "descend({x} * {x})", "descend({x})"),
    "v{n} = gradient({x}, {x})",
)
_TARGETS = ("{x}", "{x}", "{x}.data", "{x}.detach()", "{x}[:1]", "{x}.data[:1]", "{x}.detach()[0]")
_CHANGES = (
    *("{t}.mul_(3)", "{t}.mul_(3)", "{t}[:1] = 0.5", "{t}.fill_(0.5)", "{t}.copy_({t} * {t})"),
    *("{t}.zero_()", "{t}.sin_()", "{t}.add_({y}.sum())", "torch._foreach_mul_([{t}], 2.0)"),
    *("{t}.detach()[1:1].mul_(2)", "{t}.data[1:1].mul_(2)"),
)
_MODES = ("{}", "{}", "with torch.no_grad(): {}", "with torch.inference_mode(): {}")


def _layout(rng: random.Random, shape: tuple[int, ...], mesh: Sequence[int]) -> str:
    words = [rng.choice(("R", "P", "S0", "S1", "S0", "S1")[: 2 + 2 * len(shape)]) for _ in mesh]
    if len(mesh) == 1 and rng.random() < 0.4:  # parts of other sizes, empty ones too
        dim = rng.randrange(len(shape))
        cuts = sorted(rng.randint(0, shape[dim]) for _ in range(mesh[0] - 1))
        sizes = [
            after - before for before, after in zip([0, *cuts], [*cuts, shape[dim]], strict=True)
        ]
        words = [f"S{dim}({','.join(map(str, sizes))})"]
    return repr(" ".join(words))


def _looks(
    rng: random.Random, forms: Sequence[str], names: list[str], numbers: Iterator[int], some: int
) -> list[str]:
    """Some statements of these forms; fewer if some are empty."""
    texts = [
        rng.choice(forms).format(x=rng.choice(names), y=rng.choice(names), n=next(numbers))
        for _ in range(some)
    ]
    return [text for text in texts if text]


def made(number: int, mesh: Sequence[int]) -> Program:
    """The program of a number."""
    rng = random.Random(number)
    while True:
        shape = rng.choice(_SHAPES)
        lines = rng.choice(_MAKES).format(s=shape, p=_layout(rng, shape, mesh)).splitlines()
        lines.append("v1 = " + rng.choice(_VIEWS).format(of="v0"))
        if rng.random() < 0.6:
            lines.append("v2 = " + rng.choice(_VIEWS).format(of=rng.choice(("v0", "v1", "v1"))))
        names = [line.split()[0] for line in lines]
        numbers = count(20)
        lines += _looks(rng, _SEES, names, numbers, rng.randint(0, 3))
        for _ in range(rng.randint(1, 3)):
            target = rng.choice(_TARGETS).format(x=rng.choice(names))
            text = rng.choice(_CHANGES).format(t=target, y=rng.choice(names))
            lines.append(rng.choice(_MODES).format(text))
            if rng.random() < 0.5:
                lines += _looks(rng, _SEES, names, numbers, 1)
        lines += _looks(rng, _ENDS, names, numbers, rng.randint(1, 3))
        for line in list(lines):
            if line[0] == "n":
                name, _, node = line.partition(" = ")
                lines.append(f"v{name[1:]} = torch.tensor(float({node} is {name}))")
        program = Program(lines, tuple(mesh), number)
        if is_said(program) and expect(program):
            return program
