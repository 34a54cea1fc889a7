"""Torch's operators on sharded tensors: a table of functions, and families of functions.

A function that is neither in the table nor in a family raises.
"""

from tilework.sharded.ops import (
    basic,
    by_tile,
    comparisons,
    embedding,
    filling,
    foreach,
    gradients,
    linear,
    losses,
    reductions,
    slicing,
)
from tilework.sharded.registry import install

install(
    {
        **by_tile.TABLE,
        **basic.TABLE,
        **gradients.TABLE,
        **filling.TABLE,
        **losses.TABLE,
        **slicing.TABLE,
        **comparisons.TABLE,
        **linear.TABLE,
        **embedding.TABLE,
        **foreach.TABLE,
    },
    [module.family for module in (reductions, foreach, by_tile)],
)
