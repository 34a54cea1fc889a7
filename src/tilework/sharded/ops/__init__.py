"""Torch's operators on sharded tensors. One table binds them; everything else raises."""

from tilework.sharded.ops import (
    basic,
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
        **foreach.TABLE,
        **dim_ops.TABLE,
        **reductions.TABLE,
        **losses.TABLE,
        **slicing.TABLE,
        **cat.TABLE,
        **comparisons.TABLE,
        **linear.TABLE,
        **embedding.TABLE,
    }
)
