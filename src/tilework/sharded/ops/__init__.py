"""Torch's operators on sharded tensors. One table binds them; everything else raises."""

from tilework.sharded.ops import (
    basic,
    elementwise,
)
from tilework.sharded.registry import install

install(
    {
        **basic.TABLE,
        **elementwise.TABLE,
    }
)
