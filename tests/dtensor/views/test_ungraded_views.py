"""Views that are made without gradients, of what has them, and are written to."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dtensor.views.test_copied_views import SQUARE, Make, check

REFUSED = "A view was created in no_grad mode"


def test_a_view_that_was_made_without_gradients_is_refused_after_a_write() -> None:
    def program(make: Make) -> list[Any]:
        leaf = make(SQUARE).requires_grad_()
        x = leaf * 1
        with torch.no_grad():
            views = [x[0], x.view(-1), x.t()[1], *x.unbind()]
        x.data.mul_(2)
        before = (views[0] * 1).detach()
        x.add_(1)
        for view in views:
            with pytest.raises(RuntimeError, match=REFUSED):
                view * 2
        with torch.no_grad():
            return [before, views[0] * 2, *[view.detach() for view in views]]

    check(program)


def test_so_is_one_of_a_leaf_until_that_leaves_the_graph() -> None:
    def program(make: Make) -> list[Any]:
        x = make(SQUARE).requires_grad_()
        with torch.no_grad():
            row = x[1]
            row.add_(1)
        with pytest.raises(RuntimeError, match=REFUSED):
            torch.mul(input=row, other=2)
        x.requires_grad_(False)
        return [row * 2, x]

    check(program)
