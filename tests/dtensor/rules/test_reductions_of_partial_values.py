"""Casts of partial values, also by ``dtype=``: the value is cast, and no term of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.dtensor.op_checks import check_op, torch_computes
from tests.tables import each

INTEGER_NANSUMS = torch_computes(lambda: torch.ones(2).nansum(dtype=torch.int64))
FRACTIONS = torch.tensor([[-1.5, 0.5, 1.25], [2.5, -3.75, 4.5], [0.5, 0.5, 1.75]])


@each(
    "fn",
    [
        *(
            lambda x, dtype=dtype: x.to(dtype)
            for dtype in (torch.int32, torch.bool, torch.float16, torch.complex64)
        ),
        lambda x: x.to(torch.float8_e4m3fn).float(),
        lambda x: x.sum(dtype=torch.int32),
        lambda x: x.sum(0, dtype=torch.int64),
        lambda x: x.sum(1, keepdim=True, dtype=torch.float16),
        lambda x: x.cumsum(0, dtype=torch.int64),
        lambda x: x.cumsum(1, dtype=torch.float64),
        lambda x: x.mean(dtype=torch.float64),
        # torch 2.6 has it for floating point numbers only.
        lambda x: x.nansum(dtype=torch.int64 if INTEGER_NANSUMS else torch.float64),
        lambda x: x.prod(0, dtype=torch.int64),
        lambda x: torch.softmax(x, 0, dtype=torch.float64),
    ],
)
@each("op", ["sum", "avg", "max", "min", "product"])
def test_fractions_are_cast_once_reduced(fn: Callable[[Tensor], Tensor], op: str) -> None:
    check_op(fn, FRACTIONS, partial=[op], meshes=[(2,)], grads=False)


@each("dtype", [torch.uint8, torch.int8, torch.int16])
@each(
    "fn",
    [
        lambda x: x.sum(),
        lambda x: x.sum(0, dtype=torch.int32),
        lambda x: x.cumsum(0),
        lambda x: x.cumsum(0, dtype=torch.uint8),
        lambda x: x.cumprod(1, dtype=torch.int16),
        lambda x: x.trace(),
        lambda x: x.mean(dtype=torch.float32),
        lambda x: x.float(),
    ],
)
def test_sums_that_have_wrapped_around_are_not_widened(
    fn: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    wrap_around = torch.iinfo(dtype).max - torch.arange(9).view(3, 3)
    check_op(fn, wrap_around.to(dtype), meshes=[(2,)], grads=False)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_comes_and_goes(dtype: torch.dtype) -> None:
    check_op(lambda x: x.to(dtype).to(torch.float64), FRACTIONS, grads=False)
