"""Results that are made again are those that torch makes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tilework.plan.repeats import keep, key_of, repeated

_aten = torch.ops.aten
CALLS: dict[str, Callable[[Tensor], tuple[object, tuple[object, ...]]]] = {
    "elementwise": lambda x: (_aten.add.Tensor, (x, x)),
    "new": lambda x: (_aten.mm.default, (x, x)),
    "several": lambda x: (_aten.max.dim, (x, 1)),
    "strides": lambda x: (_aten.exp.default, (x.t(),)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_result_has_the_same_sizes(name: str) -> None:
    func, args = CALLS[name](torch.empty(3, 3, device="meta"))
    key, made = key_of(func, args, {}), func(*args)  # type: ignore[operator]
    keep(key, args, made)
    again = repeated(key, args)
    for a, b in zip(*((x if isinstance(x, tuple) else (x,)) for x in (made, again)), strict=False):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def test_an_operator_in_place_gives_the_first_argument() -> None:
    x, y = torch.empty(3, device="meta"), torch.empty(3, device="meta")
    key = key_of(_aten.add_.Tensor, (x, 2.0), {})
    keep(key, (x, 2.0), x)
    assert repeated(key_of(_aten.add_.Tensor, (y, 3.0), {}), (y, 3.0)) is y


def test_views_and_numbers_that_decide_sizes_are_asked_again() -> None:
    x = torch.empty(4, 4, device="meta")
    assert key_of(_aten.view.default, (x, [16]), {}) is None
    assert key_of(_aten.topk.default, (x, 1), {}) != key_of(_aten.topk.default, (x, 2), {})


def test_equal_numbers_of_other_types_and_other_default_dtypes_are_asked_again() -> None:
    x = torch.empty(4, dtype=torch.int64, device="meta")
    keys = [key_of(_aten.rsub.Scalar, (x, one), {}) for one in (1, 1.0, True)]
    torch.set_default_dtype(torch.float64)
    try:
        keys.append(key_of(_aten.rsub.Scalar, (x, 1.0), {}))
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(set(keys)) == 4
