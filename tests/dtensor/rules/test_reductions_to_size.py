"""Operators that give the tensor itself where there is nothing to be done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.dtensor.views.test_moved_views import BOX, Make, check
from tests.tables import each
from tilework.dtensor import Partial, distribute_tensor, init_device_mesh
from tilework.testing import run_ranks

CALLS: dict[str, Callable[[Any], Any]] = {
    "sum_to_size": lambda x: x.sum_to_size(x.shape),
    "sum_to_size, one by one": lambda x: x.sum_to_size(*x.shape),
    "to_dense": lambda x: x.to_dense(),
    "to_dense of a dtype": lambda x: x.to_dense(x.dtype),
    "to_dense of another": lambda x: x.to_dense(torch.float64),
    "type": lambda x: x.type(x.dtype),
    "type by name": lambda x: x.type("torch.FloatTensor"),
    "type of another": lambda x: x.type(torch.DoubleTensor),
}


@each("name", CALLS)
def test_the_result_is_the_tensor_itself_where_torchs_is(name: str) -> None:
    def program(make: Make) -> list[Any]:
        x = make(BOX[0]).t()
        result = CALLS[name](x)
        result.add_(1)
        return [x, result, result is x, result.stride()]

    check(program)


@each("name", [name for name in CALLS if "another" not in name])
def test_partial_values_stay_partial(name: str) -> None:
    def program(rank: int) -> None:
        x: Tensor = distribute_tensor(torch.ones(2, 3), init_device_mesh("cpu", (2,)), [Partial()])
        assert CALLS[name](x) is x

    run_ranks(2, program)
