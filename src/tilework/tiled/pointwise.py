"""Which operators treat each element on its own: torch itself says so."""

from __future__ import annotations

import torch


def pointwise_names() -> set[str]:
    """The operators with torch's tag ``pointwise``, without underscores at either end.

    Example:
        >>> {"add", "relu", "erfinv"} <= pointwise_names()
        True
    """
    found = set()
    for full in torch._C._dispatch_get_all_op_names():
        space, _, name = full.partition("::")
        name, _, overload = name.partition(".")
        if space != "aten" or name.endswith("_backward"):
            continue
        tags = torch._C._get_operation_overload(f"aten::{name}", overload)[2]
        if torch.Tag.pointwise in tags:
            found.add(name.strip("_").removeprefix("special_"))
    return found
