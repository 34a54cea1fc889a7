"""A part of the random programs, and of those that went wrong once."""

from __future__ import annotations

import pytest

from tests.fuzz.minimise import minimise
from tests.fuzz.programs import MESHES, Outcome, Program, compare, expect, made, run_programs

#: Programs of each mesh.
COUNT = 50


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_programs_give_what_plain_tensors_give(mesh: tuple[int, ...]) -> None:
    programs = [program for n in range(COUNT) if expect(program := made(1000 + n, mesh))]
    assert len(programs) > COUNT * 0.9
    wrong = [each for each in run_programs(programs) if each.kind != "right"]
    assert not wrong, f"{wrong[0].kind}: {wrong[0].why}\n{wrong[0].program}"


def test_what_goes_wrong_is_made_short() -> None:
    lines = ["v0 = data((4, 4), 1, 'S0')", "v1 = v0 * 2", "v2 = v1.sin()", "v3 = v0.numpy()"]
    program = Program(lines, (2,))
    assert expect(program)
    (outcome,) = run_programs([program])
    assert outcome.kind == "raised"
    shortest: Outcome = minimise(outcome)
    assert list(shortest.program.statements) == ["v0 = data((4, 4), 1, 'R')", "v3 = v0.numpy()"]


@pytest.mark.parametrize(
    "program",
    [
        "v0 = data((1,), 3, 'R')\nv0[v0 > 0.3] = v0",
        "v0 = leaf('v0', (2, 2, 2), 57, 'S2')\nv1 = v0[-2, 1, 0]\n"
        "with torch.inference_mode(): write_local(v1, 0.0)",
        "v0 = leaf('v0', (4, 4), 83, 'S0')\nv2 = torch.nn.functional.layer_norm(v0.t(), (4,))",
        "v0 = data((1,), 99, 'S0')\nv0[:] += 2.0\nv3 = v0.unfold(-1, 1, 2)",
    ],
)
def test_programs_that_went_wrong_once(program: str) -> None:
    compare(program)
