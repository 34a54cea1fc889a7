"""Indexing of every kind."""

from __future__ import annotations

from typing import Any

from tilework.dtensor.registry import Answer, Arg, rule
from tilework.dtensor.rules.slicing import basic, indexed


@rule("__getitem__")
def _getitem(input: Arg, index: Any) -> Answer:
    items = basic(index, input.shape)
    return None if items is None else indexed(input, items)
