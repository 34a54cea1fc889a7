"""Torch's operators on sharded tensors. One table binds them; everything else raises."""

from tilework.sharded.ops import (
    along,
    basic,
    comparing,
    elementwise,
    embedding,
    linear,
    reductions,
    slicing,
)
from tilework.sharded.registry import install

install(
    {
        **basic.TABLE,
        **elementwise.TABLE,
        **along.TABLE,
        **reductions.TABLE,
        **slicing.TABLE,
        **comparing.TABLE,
        **linear.TABLE,
        **embedding.TABLE,
    }
)
