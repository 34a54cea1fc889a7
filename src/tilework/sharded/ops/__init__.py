"""Torch's operators on sharded tensors: a table of functions, and families of functions.

A function that is neither in the table nor in a family raises.
"""

from tilework.sharded.ops import (
    basic,
    by_rule,
    cat,
    comparisons,
    dim_ops,
    elementwise,
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
        **elementwise.TABLE,
        **basic.TABLE,
        **gradients.TABLE,
        **filling.TABLE,
        **losses.TABLE,
        **by_rule.TABLE,
        **slicing.TABLE,
        **cat.TABLE,
        **comparisons.TABLE,
        **linear.TABLE,
        **embedding.TABLE,
        **foreach.TABLE,
    },
    [module.family for module in (reductions, dim_ops, by_rule, foreach, elementwise)],
)
