"""Names that the other packages of tilework use."""

from tilework.comm.functional.api import *  # noqa: F403
from tilework.comm.functional.api import Group, Op, copy_to_group
from tilework.comm.functional.api import __all__ as __all__
from tilework.comm.functional.async_tensor import AsyncTensor, attached
from tilework.comm.functional.kinds import CopyToGroup, pull_back
from tilework.comm.functional.running import (
    AT_ONCE_BYTES,
    group_named,
    named,
    rank_in,
    root_of,
    run,
    size_of,
)
