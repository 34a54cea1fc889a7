"""Python numbers of tensors of one element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.tables import each
from tilework.dtensor import DTensor, Replicate, distribute_tensor, init_device_mesh
from tilework.testing import run_ranks


@each("function", [float, int, bool, complex])
def test_parameter_of_one_element_is_a_number(function: Callable[[Any], Any]) -> None:
    def main(rank: int) -> tuple[Any, int, int]:
        mesh = init_device_mesh("cpu", (2,))
        scale = nn.Parameter(distribute_tensor(torch.tensor(2.5), mesh, [Replicate()]))
        before = scale._version
        return function(scale), before, scale._version

    for number, before, after in run_ranks(2, main):
        assert number == function(2.5)
        assert before == after


def test_number_of_a_tensor_is_no_write() -> None:
    def main(rank: int) -> Tensor:
        mesh = init_device_mesh("cpu", (2,))
        x = distribute_tensor(torch.tensor(3.0), mesh, [Replicate()]).requires_grad_()
        y = x * 2
        z = y * y
        assert float(y) == 6.0
        z.backward()  # type: ignore[no-untyped-call]
        assert isinstance(x.grad, DTensor)
        return x.grad.full_tensor()

    assert all(grad == 24.0 for grad in run_ranks(2, main))
