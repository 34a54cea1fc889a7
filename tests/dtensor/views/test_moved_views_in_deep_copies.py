"""Deep copies share memory with each other where those do that they are copies of."""

from __future__ import annotations

import copy
from typing import Any

import torch

from tests.dtensor.views.test_moved_views import BOX, Make, check

MATRIX = BOX[0]


def test_copies_of_views_and_bases_share_memory() -> None:
    def program(make: Make) -> list[Any]:
        x = make(MATRIX)
        x.t_()
        views = [x.detach()[1], x[1:][0], x[:, 1], x.t()[1]]
        copied, *shown = copy.deepcopy([x, *views])
        copied.add_(100)
        for number, view in enumerate(shown):
            view.mul_(number + 2)
        return [x, copied, *shown, *views, shown[3].storage_offset()]

    check(program)


def test_copies_are_leaves_of_their_own() -> None:
    def program(make: Make) -> list[Any]:
        x = make(MATRIX).requires_grad_()
        (x * x).sum().backward()  # type: ignore[no-untyped-call]
        row, twin = copy.deepcopy([x.detach()[1], x])
        row.requires_grad_()
        (row * twin).sum().backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            row.add_(1)
            twin[1, 0] *= 3
        row.detach_()
        return [twin, twin.grad, row, row._is_view(), x, x.grad]

    check(program)


def test_views_without_their_base_and_copies_of_parameters() -> None:
    def program(make: Make) -> list[Any]:
        parameter = torch.nn.Parameter(make(MATRIX))
        whole = parameter.detach()
        row, column, twin, data = copy.deepcopy([whole[1], whole[:, 0], parameter, whole])
        row.zero_()
        column.add_(2)
        twin.data.mul_(3)
        return [parameter, row, column, twin, data]

    check(program)
