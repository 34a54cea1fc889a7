"""A user's own autograd.Function beside operators in place: both graphs are one."""

from __future__ import annotations

import pytest

from tests.fuzz.programs import compare

_GIVEN = "v0 = leaf('v0', (4,), 1, 'R')\nv1 = data((3, 4), 2, 'S1')\n"


@pytest.mark.parametrize(
    "program",
    [
        "v1 = recomputed(lambda a: a.sin(), v0, reentrant=True)\nv1.masked_fill_(v1 > 0.3, 2.0)",
        "v1 = own(v0)\nv1.mul_(3.0)",
        "v1 = own(v0)\nv1[0].mul_(3.0)",
        "v1 = own(own(v0))\ntorch._foreach_mul_([v1], 3.0)",
        "v1 = own(v0)\nv1.detach_()",
    ],
)
@pytest.mark.parametrize("lies", ["S0", "P"])
def test_a_result_that_was_written_to_is_taken_as_it_is_now(program: str, lies: str) -> None:
    compare(f"v0 = leaf('v0', (3, 4), 1, '{lies}')\n{program}\nv2 = own(own(v1))\nv3 = v2 * v1")


@pytest.mark.parametrize(
    "write",
    [
        "v1[0] = v0",
        "v1[0].mul_(v0)",
        "v1[:, 2:2].add_(v0[2:2])",
        "v1.t()[1:].mul_(v0[:1])",
        "torch._foreach_mul_([v1[0]], [v0])",
        "v1[:0].addcmul_(v0, v0)",
    ],
)
@pytest.mark.parametrize("call", ["own(v1)", "recomputed(lambda a: a.sin(), v1, reentrant=True)"])
def test_a_base_that_a_view_has_brought_into_the_graph(write: str, call: str) -> None:
    compare(f"{_GIVEN}{write}\nv2 = {call}")
