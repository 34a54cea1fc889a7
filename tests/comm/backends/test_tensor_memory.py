"""The memory under tensors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilework.comm.backends.tensor_memory import as_bytes, stand_in
from tilework.comm.forms import Operation


def test_one_element_of_any_stride() -> None:
    element = torch.arange(6.0).view(1, 6).t()[2:3]
    assert element.is_contiguous()
    assert element.stride() == (1, 6)
    assert as_bytes(element).tolist() == as_bytes(torch.tensor([2.0])).tolist()


def test_memory_is_shared() -> None:
    tensor = torch.zeros(2, 3)
    as_bytes(tensor).fill_(255)
    assert tensor.isnan().all()
    assert as_bytes(torch.empty(0, 3)).shape == (0,)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=4).filter(
        lambda dims: math.prod(size for size, _ in dims) <= 64
    )
)
def test_elements_at_one_address_are_seen(dims: list[tuple[int, int]]) -> None:
    sizes, strides = zip(*dims, strict=True)
    tensor = torch.zeros(99).as_strided(sizes, strides)
    places = [
        sum(at * stride for at, stride in zip(index, strides, strict=True))
        for index in itertools.product(*map(range, sizes))
    ]
    operation = Operation(kind="all_reduce")
    if len(set(places)) < len(places) and not tensor.is_contiguous():
        with pytest.raises(ValueError, match=r"share memory; pass its clone\(\)"):
            stand_in(tensor, operation)
    else:
        assert stand_in(tensor, operation).shape == tensor.shape
