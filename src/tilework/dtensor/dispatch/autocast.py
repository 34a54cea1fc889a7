"""``torch.autocast`` for operators that are computed otherwise than by torch's own kernel.

Where the operator itself runs on local tensors, torch casts these. Where a composition of other
operators stands in for it, autocast sees only those: this module then makes the cast to float32
that torch would make of the operator's inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tilework.dtensor.propagation.dtensor_call import DTensorCall
from tilework.dtensor.propagation.pytree import with_tensors

#: Operators that autocast computes in lower precision or in the widest dtype that is given: what
#: they are composed of is of this kind itself.
_NOT_IN_FLOAT32 = frozenset({
    *("addbmm", "addmm", "addmv", "addr", "baddbmm", "bmm", "chain_matmul", "einsum", "linear"),
    *("linalg_multi_dot", "linalg_vecdot", "matmul", "mm", "mv", "prelu", "convolution"),
    *("conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d"),
    *("conv_transpose3d", "gru_cell", "lstm_cell", "rnn_relu_cell", "rnn_tanh_cell"),
    *("scaled_dot_product_attention", "cat", "stack", "index_copy", "index_put", "scatter_add"),
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "tensordot"),
    "grid_sampler",
})  # fmt: skip
_PADDINGS = {"reflect": "reflection_pad", "replicate": "replication_pad"}

is_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled


def in_float32(name: str, call: DTensorCall) -> Callable[[], Any] | None:
    """A function that runs the call in float32; None if autocast leaves the operator's dtype.

    Args:
        name: The operator's name.
        call: The operator's call, not in place.
    """
    device = call.mesh.device_type
    if not torch.is_autocast_enabled(device) or not _is_in_float32(_kernel(name, call), device):
        return None
    args, kwargs = with_tensors(call.args, call.kwargs, map(_in_float32, call.tensors))

    def run() -> Any:
        with torch.autocast(device, enabled=False):
            return call.func(*args, **kwargs)

    return run


def _in_float32(tensor: Tensor) -> Tensor:
    is_cast = tensor.is_floating_point() and tensor.dtype != torch.float64
    return tensor.float() if is_cast else tensor


def _kernel(name: str, call: DTensorCall) -> str:
    """The name of torch's kernel that computes a call."""
    if name == "nll_loss_nd":
        return "nll_loss"
    if name != "pad":
        return name
    widths = call.args[1] if len(call.args) > 1 else call.kwargs.get("pad", ())
    mode = call.args[2] if len(call.args) > 2 else call.kwargs.get("mode", "constant")
    return f"{_PADDINGS.get(mode, mode)}{len(widths) // 2}d"


def _is_in_float32(name: str, device: str) -> bool:
    """True if torch has a kernel of this name for autocast, which casts to float32."""
    return name not in _NOT_IN_FLOAT32 and f"aten::{name}" in _with_kernels(device)


@cache
def _with_kernels(device: str) -> frozenset[str]:
    """The names of the operators for which autocast has kernels on a type of device."""
    known: Callable[[str], list[str]] = torch._C._dispatch_get_registrations_for_dispatch_key
    return frozenset(name.partition(".")[0] for name in known(f"Autocast{device.upper()}"))
