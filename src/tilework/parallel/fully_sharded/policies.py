"""Settings of fully_shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of a fully sharded module's step.

    Attributes:
        param_dtype: The dtype of gathered parameters, forward and backward; None: the parameters'
            own. The shards that the optimizer steps on keep their dtype.
        reduce_dtype: The dtype of reductions of gradients; None: the dtype of computation.
        output_dtype: The dtype of floating-point outputs of forward; None: as computed.
        cast_forward_inputs: Floating-point inputs of forward are cast to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class OffloadPolicy:
    """The policy without offloading: between uses parameters stay on the device of the mesh."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Parameters, gradients and optimizer states stay on the CPU, for modules that compute there.

    Attributes:
        pin_memory: Accepted for torch's sake.
    """

    pin_memory: bool = True


@dataclass(frozen=True)
class DataParallelMeshDims:
    """The axes of a mesh for all kinds of parallelism that are data parallel.

    Attributes:
        shard: The axis that parameters are sharded over; a tuple of axes is made a single axis.
        replicate: The axis of replicas; a tuple is made a single axis. None: no replicas.
    """

    shard: str | tuple[str, ...]
    replicate: str | tuple[str, ...] | None = None


@dataclass
class Reduction:
    """The reduction of full gradients to gradients of shards; unless it ``is_due`` they wait, and
    without ``reduces_replicas`` where there are replicas. With ``sums`` collectives do not divide.
    """

    is_due: bool = True
    reduces_replicas: bool = True
    divide_factor: float | None = None
    sums: bool = False
    hook: Callable[[Tensor], None] | None = None


@dataclass(frozen=True)
class Purpose:
    """The purpose of a collective, as the whole text in errors."""

    text: str

    def __str__(self) -> str:
        return self.text
