"""The rules of torch's operators, by family."""

from tilework.dtensor.rules import (
    creation,
    elementwise,
    indexing,
    linear,
    norms,
    random,
    reshaping,
    slicing,
    views,
)

__all__ = [
    "creation",
    "elementwise",
    "indexing",
    "linear",
    "norms",
    "random",
    "reshaping",
    "slicing",
    "views",
]
