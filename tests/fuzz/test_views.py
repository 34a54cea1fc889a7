"""Views of what is written to, in ways that torch counts and in others."""

from __future__ import annotations

from tests.fuzz import views
from tests.fuzz.programs import MESHES, compare, run_programs
from tests.tables import each

#: Programs of each mesh and kind.
COUNT = 16


@each("mesh", MESHES)
def test_views_go_where_torch_derives_them_from(mesh: tuple[int, ...]) -> None:
    programs = [views.made(number, mesh, "writes") for number in range(7000, 7000 + COUNT)]
    bad = [each for each in run_programs(programs) if each.kind not in ("right", "refused")]
    assert not bad, f"{bad[0].kind}: {bad[0].why}\n{bad[0].program}"


_COMPUTED = "v9 = leaf('v9', (4, 6), 1, {layout})\nv0 = v9 * 2\n"


@each("layout", ["R", "P", "S0", "S1"])
@each(
    "program",
    [
        # A hook on a view stays where a write is not counted.
        "v1 = v0[None].expand(2, 4, 6).reshape(1, 2, 4, 6)\nv2 = v1.mean()\n"
        "v1[..., 0].data[:, :1].mul_(2)\nwatch(v1, 'v1')",
        "v1 = v0.flatten()\nkeep(v1, 'v1')\nv2 = v1 * 3\nv1.data.detach()[:2].mul_(2)\nv3 = v1 * 2",
        # Counted writes move what keeps its gradient along.
        "v1 = v0.flatten()\nkeep(v1, 'v1')\nwith torch.no_grad(): v1.mul_(3)\nv2 = v1 * 2",
        # Writes through a view of a view that was written to.
        "v1 = v0.view(8, 3)[:, 1:3]\nv1.mul_(2)\nv1[..., 0] = 5.0\nv2 = v1 * v1",
        "v1 = v0.view(2, 12)[1].view(3, 4)[:, 1:3]\nv1.mul_(2)\nv1[..., 0] = 5.0\nv2 = v1 * v1",
    ],
)
def test_views_that_went_wrong_once(program: str, layout: str) -> None:
    compare(_COMPUTED.format(layout=repr(layout)) + program)
