"""The dtypes of a step of DistributedDataParallel, and casts to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilework.parallel.data_parallel.outputs import replace_tensors


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of a step of DistributedDataParallel.

    Attributes:
        param_dtype: The dtype of forward and backward; the parameters themselves keep their own.
            None: forward and backward use the parameters' dtype.
        reduce_dtype: The dtype of averages of gradients; None: the parameters' own dtype.
        buffer_dtype: The dtype of floating-point buffers, which are cast once, at construction;
            None: buffers are not cast.
        cast_forward_inputs: Floating-point inputs of forward are cast to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __new__(cls, *args: Any, **kwargs: Any) -> MixedPrecision:
        """Refuse the settings of torch's FSDP1, whose class has the same name."""
        theirs = sorted(_OF_FSDP1.intersection(kwargs))
        if theirs:
            raise TypeError(
                f"tilework.parallel.MixedPrecision is DistributedDataParallel's, and has no "
                f"{', '.join(theirs)}, which torch.distributed.fsdp.MixedPrecision has: "
                f"fully_shard takes mp_policy=MixedPrecisionPolicy(param_dtype=…, reduce_dtype=…)"
            )
        return super().__new__(cls)


_OF_FSDP1 = {"keep_low_precision_grads", "cast_root_forward_inputs", "_module_classes_to_ignore"}


def checked_precision(given: Any) -> MixedPrecision | None:
    """Check the type of DistributedDataParallel's argument ``mixed_precision``, and return it.

    Raises:
        TypeError: ``given`` is neither None nor a MixedPrecision.
    """
    if given is None or isinstance(given, MixedPrecision):
        return given
    kind = type(given)
    raise TypeError(
        f"DistributedDataParallel takes tilework.parallel.MixedPrecision, got {kind.__name__} of "
        f"{kind.__module__}; MixedPrecisionPolicy is for fully_shard"
    )


def moved(value: Any, device: torch.device) -> Any:
    """A copy of a value with all tensors on a device."""
    return replace_tensors(value, lambda tensor: tensor.to(device))


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """A copy of a value with all floating-point tensors in a dtype."""
    return replace_tensors(value, lambda t: t.to(dtype) if t.is_floating_point() else t)
