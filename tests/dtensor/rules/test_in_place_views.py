"""Operators that change a tensor's dims in place: it becomes a view of what it was."""

from __future__ import annotations

import pytest

from tests.fuzz.programs import compare


@pytest.mark.parametrize(
    "program",
    [
        # Written to afterwards, though a Function has made it where no gradients are recorded.
        "v0 = leaf('v0', (4, 4), 62, 'P')\nv1 = recomputed(lambda a: a.sin() + a, v0, "
        "reentrant=True)\nv1.squeeze_()\nv1.addcdiv_(v0, v0.abs() + 1)",
        "v0 = leaf('v0', (3, 3), 32, 'S0')\nv1 = recomputed(lambda a: a.sin() + a, v0, "
        "reentrant=True)\nv1.t_()\nv1.pow_(2)",
        # Written to in the graph, which it was not in.
        "v0 = leaf('v0', (), 6, 'P')\nv1 = data((4, 4), 20, 'R')\nv1.t_()\n"
        "torch._foreach_div_([v1], [v0.abs() + 1])",
        # Cut off the graph afterwards.
        "v0 = leaf('v0', (3,), 75, 'P')\nwith torch.no_grad(): v0.transpose_(0, 0)\n"
        "with torch.no_grad(): v0.detach_()\nv1 = v0 * 2",
        "v0 = leaf('v0', (3, 1), 75, 'S0')\nv1 = v0 * 2\nv1.t_()\nv1.detach_()\nv2 = v1 * 2",
    ],
)
def test_tensors_whose_dims_changed_are_no_views_of_others(program: str) -> None:
    compare(program)
