"""Settings of fully_shard."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of a fully sharded module's step.

    Attributes:
        param_dtype: Parameters are gathered, and forward and backward computed, in it; None: as
            they are. The shards that the optimizer steps on keep their dtype.
        reduce_dtype: Gradients are reduced in it; None: in that of the computation.
        output_dtype: Floating-point outputs of forward are cast to it; None: as they are.
        cast_forward_inputs: Floating-point inputs of forward are cast to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True)
class OffloadPolicy:
    """The place of parameters between their uses: the device of the mesh."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Parameters, gradients and optimizer states stay on the CPU, for modules that compute there.

    Attributes:
        pin_memory: Accepted for torch's sake.
    """

    pin_memory: bool = True
