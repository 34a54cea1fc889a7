"""DTensors, told in a line and drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilework.dtensor.tensor import DTensor


def headline(tensor: DTensor) -> str:
    """Shape, dtype, mesh and placements in a line."""
    where = f"{list(tensor.placements)} on {tensor.device_mesh}"
    return f"DTensor {tensor.dtype} {list(tensor.shape)} {where}"
