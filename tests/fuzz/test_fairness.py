"""Programs of which torch's result depends on how it loops, or on what it keeps."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.fuzz.fairness import Fairness
from tests.fuzz.programs import Program, expect


@pytest.mark.parametrize(
    ("text", "is_fair"),
    [
        ("torch.add(x[:, :, 0], x, out=x)", False),
        ("torch.add(x, x, out=x)", True),
        ("x[:, 0].add_(x[:, 1])", True),
        ("x[:, :2, 0].add_(x[:, 1:3, 0])", False),
        ("x.mul_(x)", True),
        ("torch.sum(x, 0, out=torch.empty(0))", True),
        ("torch.sum(x, 0, out=y[1])", True),
        ("torch.sum(x, 0, out=y[0, 0, :0])", True),
        ("torch.sum(x, 0, out=y[2, 2, 3:])", False),
        ("y.resize_([2, 2])", True),
        ("y.resize_([40])", False),
        ("torch._foreach_add_([x[0]], [x[1]])", True),
    ],
)
def test_what_depends_on_loops_is_not_fair(text: str, is_fair: bool) -> None:
    x = torch.rand(3, 3, 3)
    with Fairness() as operators, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(text, {"torch": torch, "x": x, "y": x.clone()})
    assert operators.is_fair is is_fair


@pytest.mark.parametrize(
    ("text", "is_fair", "has_gradients"),
    [
        # A gradient in the midst, of memory written to behind autograd's back.
        (
            "v0 = leaf('v0', (4, 4), 1, 'R')\nv1 = v0.exp()\nv1.data.mul_(2.0)\ndescend(v1)",
            False,
            False,
        ),
        # The same, in the backward pass at the end.
        ("v0 = leaf('v0', (4, 4), 1, 'R')\nv1 = v0.exp()\nv1.data.mul_(2.0)", True, False),
        ("v0 = leaf('v0', (4, 4), 1, 'R')\nv1 = v0.exp()\nv0.data.mul_(2.0)", True, True),
        # A view's gradient, of other elements than it showed.
        (
            "v0 = leaf('v0', (4, 4), 1, 'R')\nv1 = v0[..., 0]\n"
            "with torch.no_grad(): v1.tanh_()\nv1.data = v1.data * 2",
            True,
            False,
        ),
        ("v0 = leaf('v0', (4, 4), 1, 'R')\nv1 = v0[..., 0]\nv1.data = v1.data * 2", True, True),
        # Whether a gradient of nothing has one itself, which depends on how views are derived.
        (
            "v0 = leaf('v0', (0, 4), 66, 'S1')\nv1 = torch.cat([v0, v0.detach()], -2)\n"
            "with torch.no_grad(): v2 = v0[:0]\nv2[:0, :] += v1\n"
            "v3 = gradient(v2 * v2, v0, create_graph=True)",
            False,
            False,
        ),
    ],
)
def test_gradients_that_torch_leaves_undefined_are_not_compared(
    text: str, is_fair: bool, has_gradients: bool
) -> None:
    program = Program(text.splitlines(), (2,))
    assert (expect(program), program.graded) == (is_fair, has_gradients)
