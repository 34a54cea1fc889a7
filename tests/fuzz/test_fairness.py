"""Programs of which torch's result depends on how it loops."""

from __future__ import annotations

import warnings

import torch

from tests.fuzz.fairness import Fairness
from tests.tables import each


@each(
    ("text", "is_fair"),
    [
        ("torch.add(x[:, :, 0], x, out=x)", False),
        ("torch.add(x, x, out=x)", True),
        ("x[:, 0].add_(x[:, 1])", True),
        ("x[:, :2, 0].add_(x[:, 1:3, 0])", False),
        ("x.mul_(x)", True),
        ("torch.sum(x, 0, out=torch.empty(0))", True),
        ("torch.sum(x, 0, out=y[1])", True),
        ("torch.sum(x, 0, out=y[0, 0, :0])", False),
        ("torch.sum(x, 0, out=y[2, 2, 3:])", False),
        ("torch.sum(x, 0, out=y)", False),
        ("torch._foreach_add_([x[0]], [x[1]])", True),
    ],
)
def test_what_depends_on_loops_is_not_fair(text: str, is_fair: bool) -> None:
    x = torch.rand(3, 3, 3)
    with Fairness() as operators, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(text, {"torch": torch, "x": x, "y": x.clone()})
    assert operators.is_fair is is_fair
