"""Programs in which tensors are given other data, at random: who sees whose writes afterwards.

A program makes a tensor ``v0`` and maybe a view ``v1`` of it, gives it data in one of many forms,
makes a view ``v3`` of what it is now, and writes to one of them; ``v2`` is another tensor.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.fuzz.programs import Program, expect, is_said

_SHAPES = ((4, 4), (5, 3), (4, 6), (6, 4), (3, 4))
_LEAF = "v0 = leaf('v0', {s}, 1, {p})"
_PLAIN = (
    "v0 = data({s}, 1, {p})",
    "v9 = leaf('v9', {s}, 1, {p})\nv0 = v9.detach()",
    "v9 = data({s}, 1, {p})\nv0 = v9[:, 1:]",
    "v9 = data({s}, 1, {p})\nv0 = v9.t()",
    "v9 = data({s}, 1, {p})\nv0 = v9[::2]",
    "v9 = data({s}, 1, {p})\nv0 = v9.flatten()",
)
_COMPUTED = (
    "v9 = leaf('v9', {s}, 1, {p})\nv0 = v9 * 2",
    "v9 = leaf('v9', {s}, 1, {p})\nv0 = v9[1:]",
    "v9 = leaf('v9', {s}, 1, {p})\nv8 = v9 * 2\nv0 = v8[1:]",
    "v9 = leaf('v9', {s}, 1, {p})\nv8 = v9 * 2\nv0 = v8.t()",
)
_BEFORE = (
    *(
        "",
        "",
        "v1 = v0.detach()[0]",
        "v1 = v0.detach()",
        "v1 = v0.detach().t()",
        "v1 = v0.data[1:]",
    ),
    *("v1 = v0 * v0", "v1 = v0.detach().flatten()", "v1 = v0.detach().reshape(-1)"),
    "v1 = v0.detach().mT[1:]",
)
_OTHERS = ("v2 = data({s2}, 7, {p2})", "v2 = leaf('v2', {s2}, 7, {p2})")
_FORMS = (
    *("v0.data", "v0.detach()", "v0.data * 2", "v0.data.clone()", "v0.data.contiguous()"),
    *("v0.data.t()", "v0.data.t().t()", "v0.data.t()[1:]", "v0.data[1:].t()"),
    *("v0.data[1:]", "v0.data[:, 1:]", "v0.data[::2]", "v0.data[0]", "v0.data[[1, 0]]"),
    *("v0.data.reshape(-1)", "v0.data.reshape(2, -1)", "v0.data.view(-1)", "v0.data.flip(0)"),
    *("v0.data.chunk(2)[1]", "v0.data.chunk(2, 1)[0]", "v0.data.unbind(1)[1]", "v0.data.squeeze()"),
    *("v0.data.unsqueeze(0)", "v0.data.unsqueeze(1).expand(-1, 2, -1)", "v0.data.diagonal()"),
    "v0.data[None].expand(2, -1, -1)",
    *("v0.data.unflatten(0, (-1, 1))", "v0.data.roll(1, 0)", "v0.data.t().contiguous()"),
    *("v2.data", "v2.data.t()", "v2.data[1:]", "v2.data[0]", "v2.data * 2", "v2.detach()"),
    *("v2.detach().reshape(-1)", "v2.detach()[:, 1:]", "v2.data.t()[1:]"),
    *("v2.data.flatten()[1:5].view(2, 2)", "moved(v2.data, {p3})", "moved(v0.data, {p3})"),
)
_GIVING = (
    *("v0.data = {form}", "v0.data = {form}", "with torch.no_grad(): v0.data = {form}"),
    "v0.data, v2.data = v2.data, v0.data",
)
_AFTER = (
    *("", "", "v3 = v0.detach()[1:]", "v3 = v0.detach()", "v3 = v0.detach().t()", "v3 = v0 * v0"),
    *("v3 = v0.data", "v3 = v0.detach().flatten()", "v3 = v0.data[:, 0]"),
)
_IN_GRAPH = (*_AFTER, "v3 = v0[0]", "v3 = v0.flatten()", "v3 = v0[1:]", "v3 = v0[:, 0]")
_WRITES = (
    *("with torch.no_grad(): v0.mul_(3)", "v0.data.mul_(3)", "with torch.no_grad(): v0[0] = 0.5"),
    *("v0.detach().t().mul_(3)", "write_local(v0.detach(), 3.0)", "v0.detach()[1:].fill_(2.0)"),
    *("with torch.no_grad(): write_local(v0, 3.0)", "torch._foreach_mul_([v0.data], 3.0)"),
    *("v0.mul_(3)", "v0[0] = 0.5", "v0.t().mul_(2)", "with torch.no_grad(): v0.copy_(v2)"),
    *("with torch.no_grad(): v1.mul_(3)", "v1.data.mul_(3)", "v1.detach()[0].mul_(3)"),
    *("write_local(v1.detach(), 3.0)", "v2.mul_(3)", "with torch.no_grad(): v2.mul_(3)"),
    *("v2.data.mul_(3)", "with torch.no_grad(): v2.t().mul_(3)", "v2.detach()[1].mul_(3)"),
    *("write_local(v2.detach(), 3.0)", "with torch.no_grad(): v3.mul_(3)", "v3.data.mul_(3)"),
    *("v3.detach()[0].mul_(3)", "with torch.no_grad(): v9.mul_(3)", "v9.detach()[1].mul_(3)"),
    *("v8.detach()[1].mul_(3)", "with torch.no_grad(): v9.copy_(v9 * 2)"),
    *("v0.data = v0.data.t()", "v0.data = v0.data[1:]", "v2.data = v0.data", "v0.data = v1.data"),
    "descend(v0 * v0)\ntorch.optim.SGD([v0], 0.1, momentum=0.5).step()",
)
_DIMS = (
    *("with torch.no_grad(): v0.t_()", "with torch.no_grad(): v0.unsqueeze_(0)"),
    "with torch.no_grad(): v1.t_()",
)
_LAST = ("", "v4 = v0 * 3", "v4 = v0 * v0\nv5 = v0[0]", "v4 = v0.t() * 2", "v4 = copied(v0)")

#: Forms in which torch's gradients are those of other elements than a tensor shows.
SAID = r"given other data|given data of shape|of a memory of|was written to between"


def made(number: int, mesh: Sequence[int]) -> Program:
    """The program of a number."""
    rng = random.Random(number)

    def layout(shape: tuple[int, ...]) -> str:
        return repr(" ".join(rng.choice(("R", "P", "S0", "S1")[: 2 + len(shape)]) for _ in mesh))

    while True:
        shape, other = rng.choice(_SHAPES), rng.choice(_SHAPES)
        fields = {"s": shape, "s2": rng.choice((shape, other)), "p": layout(shape)}
        fields |= {"p2": layout(shape), "p3": layout(shape)}
        makes = rng.choice(((_LEAF,), (_LEAF,), _PLAIN, _COMPUTED))
        parts = [rng.choice(makes), rng.choice(_BEFORE), rng.choice(_OTHERS)]
        parts += [rng.choice(_GIVING).replace("{form}", rng.choice(_FORMS)), "after"]
        writes: Sequence[str] = _WRITES
        after: Sequence[str] = _AFTER
        if makes is not _COMPUTED:
            changes_dims = rng.random() < 0.5
            writes, after = (_WRITES + _DIMS, _AFTER) if changes_dims else (_WRITES, _IN_GRAPH)
        parts[-1] = rng.choice(after)
        parts += [rng.choice(writes) for _ in range(rng.randint(1, 2))]
        parts.append(rng.choice(_LAST))
        lines = [line for part in parts for line in part.format(**fields).splitlines() if line]
        if "v2" not in "".join(lines).replace("v2 = ", ""):
            lines = [line for line in lines if not line.startswith("v2 = ")]
        program = Program(lines, tuple(mesh), number)
        if is_said(program) and expect(program):
            return program
