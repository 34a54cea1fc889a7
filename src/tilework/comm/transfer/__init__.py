"""Plans of :mod:`tilework.layout`, run: tensors in one tiling become tensors in another.

- ``run``: :func:`run_plan`, and what can be wrong with its arguments;
- ``terms``: whether all ranks run the same plan, and how;
- ``local``: what one rank has in hand meanwhile;
- ``straight``: plans that are one collective on memory as it is;
- ``rounds``: all others, in rounds through a small buffer; ``rows`` packs and unpacks it;
- ``reducing``: rounds whose pieces are combined; ``neutral``: what else a partial result gets;
- ``fresh``: memory for results;
- ``cuts``: which elements go in which round, in pure integers.
"""

from tilework.comm.transfer.run import BUFFER_BYTES, run_plan

__all__ = ["BUFFER_BYTES", "run_plan"]
