"""The rules of torch's operators, by family."""

from tilework.dtensor.rules import (
    along,
    attention,
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
    "attention",
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
