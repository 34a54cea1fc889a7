"""Tensors that are given other data, and what shares memory with them."""

from __future__ import annotations

import re

from tests.fuzz import given_data
from tests.fuzz.programs import MESHES, compare, run_programs
from tests.tables import each

#: Programs of each mesh.
COUNT = 24


@each("mesh", MESHES)
def test_who_sees_whose_writes_is_as_in_torch(mesh: tuple[int, ...]) -> None:
    programs = [given_data.made(number, mesh) for number in range(1000, 1000 + COUNT)]
    outcomes = list(run_programs(programs))
    wrong = [each for each in outcomes if each.kind not in ("right", "refused")]
    said = [each for each in wrong if re.search(given_data.SAID, each.why)]
    bad = [each for each in wrong if each not in said or each.kind != "raised"]
    assert not bad, f"{bad[0].kind}: {bad[0].why}\n{bad[0].program}"
    assert len(said) < COUNT / 5


_LEAF = "v0 = leaf('v0', (4, 6), 1, 'S0')\n"
_STEP = "descend(v0 * v0)\ntorch.optim.SGD([v0], 0.1, momentum=0.5).step()\n"


@each("layout", ["R", "S0"])
@each(
    "program",
    [
        # Parameters and gradients that are views of one buffer.
        "v1 = data((36,), 3, {layout})\nv0.data = v1[:24].view(4, 6)\n" + _STEP + "v2 = v1 * 2",
        "v9 = leaf('v9', (4, 3), 1, 'S1')\nv1 = data((36,), 0, {layout})\nv1.zero_()\n"
        "v0.grad = v1[:24].view(4, 6)\nv9.grad = v1[24:].view(4, 3)\ndescend(v0, v9 * v9)\n"
        "v1.mul_(0.5)\nv3 = v0.grad * 1\nv4 = v9.grad * 1\nv5 = v1 * 2\n" + _STEP,
        "v1 = data((6, 4), 3, {layout})\nv0.grad = v1.t()\nv2 = v1[1:]\nv2.mul_(2)\n"
        "torch.nn.utils.clip_grad_norm_([v0], 0.5)\nv3 = v1 * 2\n" + _STEP,
        # Copies of both; of one alone.
        "v1 = data((6, 4), 3, {layout})\nv0.data = v1.t()[:, 1:]\nv3, v4 = copied([v0, v1])\n"
        "with torch.no_grad(): v3.mul_(2)\nv5 = v4 * 2\nv6 = v1 * 2",
        "v1 = v0.data[1:]\nv2 = copied(v1)\nv2.mul_(2)\nv3 = v1 * 2",
        # Circles.
        "v1 = v0.detach()\nv1.data = v1.detach()[1:]\nv1.data = v1.data.t()\nv1.mul_(2)",
        "v1 = v0.detach().flatten().detach()\nv1.data = v1.data[None].expand(2, -1)\n"
        "v2 = v1[:, 0]\nv3 = v1 * 3",
        # Base and views that require gradients later.
        "v1 = v0.detach()\nv2 = v1.flatten()\nv1.requires_grad_()\nv3 = v1 * v1\nv4 = v2 * 2",
        "v1 = own(v0)\nv0.requires_grad_(False)\nv2 = v1 * 2",
    ],
)
def test_programs_that_went_wrong_once(program: str, layout: str) -> None:
    compare(_LEAF + program.format(layout=repr(layout)))
