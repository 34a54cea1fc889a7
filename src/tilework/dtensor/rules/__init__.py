"""The rules of torch's operators, by family."""

from tilework.dtensor.rules import (
    along,
    comparing,
    creation,
    elementwise,
    extrema,
    indexing,
    linear,
    norms,
    random,
    reductions,
    reshaping,
    slicing,
    statistics,
    views,
)

__all__ = [
    "along",
    "comparing",
    "creation",
    "elementwise",
    "extrema",
    "indexing",
    "linear",
    "norms",
    "random",
    "reductions",
    "reshaping",
    "slicing",
    "statistics",
    "views",
]
