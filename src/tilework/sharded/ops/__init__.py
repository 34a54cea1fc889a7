"""Torch's operators on sharded tensors. One table binds them; everything else raises."""

from tilework.sharded.ops import (
    along,
    basic,
    comparing,
    elementwise,
    embedding,
    filling,
    foreach,
    gradients,
    joining,
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
        **along.TABLE,
        **reductions.TABLE,
        **losses.TABLE,
        **slicing.TABLE,
        **joining.TABLE,
        **comparing.TABLE,
        **linear.TABLE,
        **embedding.TABLE,
    }
)
