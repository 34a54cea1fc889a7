"""Torch's operators on sharded tensors: a table of functions, and families of functions.

A function that is neither in the table nor in a family raises.
"""

from tilework.sharded.ops import (
    attributes,
    by_tile,
    composed,
    embedding,
    linear,
    reductions,
    slicing,
)
from tilework.sharded.registry import install

install(
    {
        **by_tile.TABLE,
        **attributes.TABLE,
        **composed.TABLE,
        **slicing.TABLE,
        **linear.TABLE,
        **embedding.TABLE,
    },
    [module.family for module in (reductions, composed, by_tile)],
)
