"""Execution of :mod:`tilework.layout`'s plans: tensors of one tiling become tensors of another.

- ``run``: :func:`run_plan`, and the checks of its arguments;
- ``run_mode``: the agreement of all ranks on the plan and on how to run it;
- ``local_transfer``: this rank's group, pieces and tensors while a plan runs;
- ``single_collective``: plans that are one collective on unchanged tensors;
- ``rounds``: all other plans, in rounds through a small buffer; ``packing`` fills and empties the
  buffer, and ``round_shares`` assigns elements to rounds, in pure integers;
- ``reduce_rounds``: rounds that reduce arriving elements; ``identity_element``: the elements of a
  partial result besides the value;
- ``large_buffers``: memory for results.
"""

from tilework.comm.transfer.run import BUFFER_BYTES, run_plan

__all__ = ["BUFFER_BYTES", "run_plan"]
