"""The operators that torch tags as pointwise."""

from __future__ import annotations

import torch


def pointwise_names() -> set[str]:
    """The names of operators with torch's tag ``pointwise``, without underscores at either end.

    Example:
        >>> {"add", "relu", "erfinv"} <= pointwise_names()
        True
    """
    names = {"leaky_relu"}  # not tagged before torch 2.7
    for full in torch._C._dispatch_get_all_op_names():
        space, _, name = full.partition("::")
        name, _, overload = name.partition(".")
        if space != "aten" or name.endswith("_backward"):
            continue
        tags = torch._C._get_operation_overload(f"aten::{name}", overload)[2]
        if torch.Tag.pointwise in tags:
            names.add(name.strip("_").removeprefix("special_"))
    return names
