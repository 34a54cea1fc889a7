"""Rules of operators that hold for shards of any kind, by family. Importing them registers them."""

from tilework.tiled.rules import (
    concatenation,
    convolution,
    dim_ops,
    elementwise,
    embedding,
    extrema,
    fourier,
    linalg,
    linear,
    losses,
    pooling,
    rearranging,
    reductions,
    reshaping,
    splitting,
    statistics,
)

__all__ = [
    "concatenation",
    "convolution",
    "dim_ops",
    "elementwise",
    "embedding",
    "extrema",
    "fourier",
    "linalg",
    "linear",
    "losses",
    "pooling",
    "rearranging",
    "reductions",
    "reshaping",
    "splitting",
    "statistics",
]
