"""Whole numbers, and what is none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.tables import each
from tilework.layout.box import whole_number, whole_numbers


@each("number", [3, np.int8(3), torch.tensor(3)])
def test_whole_numbers(number: Any) -> None:
    assert (whole_number(number, "a dim"), whole_numbers([number], "dims")) == (3, (3,))


@each("number", [3.0, "3", True, None, [3]])
def test_what_is_none(number: Any) -> None:
    with pytest.raises(TypeError, match="a dim; got "):
        whole_number(number, "a dim")
    with pytest.raises(TypeError, match="dims; got "):
        whole_numbers([2, number], "dims")


@each("numbers", [3, "12", None])
def test_what_has_no_numbers(numbers: Any) -> None:
    with pytest.raises(TypeError, match=f"dims; got {numbers!r}"):
        whole_numbers(numbers, "dims")
