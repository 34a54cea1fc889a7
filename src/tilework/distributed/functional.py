"""Functional collectives: new tensors instead of overwritten ones, differentiable and traceable.

import tilework.distributed.functional as functional
"""

from tilework.comm.functional import internal as api
from tilework.comm.functional.internal import *  # noqa: F403
from tilework.comm.functional.internal import AsyncTensor

# torch's further names: there the differentiable ones have names of their own.
AsyncCollectiveTensor = AsyncTensor
all_gather_single = all_gather_single_autograd = api.all_gather_tensor
all_gather_tensor_autograd = api.all_gather_tensor
all_gather_single_coalesced = api.all_gather_into_tensor_coalesced
all_to_all_single_autograd = api.all_to_all_single
reduce_scatter_single = reduce_scatter_single_autograd = api.reduce_scatter_tensor
reduce_scatter_tensor_autograd = api.reduce_scatter_tensor
reduce_scatter_single_coalesced = api.reduce_scatter_tensor_coalesced

__all__ = [
    "AsyncCollectiveTensor",
    "AsyncTensor",
    "all_gather_single",
    "all_gather_single_autograd",
    "all_gather_single_coalesced",
    "all_gather_tensor_autograd",
    "all_to_all_single_autograd",
    "reduce_scatter_single",
    "reduce_scatter_single_autograd",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_autograd",
]
__all__ += api.__all__
