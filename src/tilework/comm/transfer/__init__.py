"""Plans of :mod:`tilework.layout`, run: tensors in one tiling become tensors in another.

- ``run``: :func:`run_plan`, and what can be wrong with its arguments;
- ``terms``: whether all ranks run the same plan, and how;
- ``straight``: plans that are one collective on memory as it is;
- ``rounds``: all others, in rounds through a small buffer;
- ``fresh``: new memory for results;
- ``cuts``: which elements go in which round, in pure integers.
"""

from tilework.comm.transfer.run import BUFFER_BYTES, run_plan

__all__ = ["BUFFER_BYTES", "run_plan"]
