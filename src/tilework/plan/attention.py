"""Attention of tensors without memory: by the kernel that torch takes on the job's device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten
#: torch's number of the flash kernels.
_FLASH = 1


@contextmanager
def attention_as_on(device: torch.device) -> Iterator[None]:
    """Within the block, attention takes the kernel of ``device``, which must be a CPU; else none.

    torch asks only for devices that it knows, and takes the formula for others.
    """
    if device.type != "cpu":
        yield
        return
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("scaled_dot_product_attention", attention, "AutogradMeta")
    try:
        yield
    finally:
        library._destroy()


def attention(  # noqa: PLR0913 - torch's signature
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As :func:`torch.nn.functional.scaled_dot_product_attention`."""
    rest = dropout_p, is_causal
    options = {"scale": scale, "enable_gqa": enable_gqa}
    if choice_of(query, key, value, attn_mask, *rest, **options) != _FLASH:
        math: Any = _aten._scaled_dot_product_attention_math
        result: tuple[Tensor, Tensor] = math(*(query, key, value, attn_mask, *rest), **options)
        return result[0]
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        minus = torch.full((), float("-inf"), dtype=query.dtype, device=query.device)
        attn_mask = torch.where(attn_mask, torch.zeros_like(minus), minus)
    flash: Any = _aten._scaled_dot_product_flash_attention_for_cpu
    out: Tensor = flash(query, key, value, *rest, attn_mask=attn_mask, scale=scale)[0]
    return out


def choice_of(*args: Any, **kwargs: Any) -> int:
    """The number of the kernel that torch takes on the CPU."""
    with torch._C._DisableTorchDispatch(), torch._C._DisableAutocast():
        given, options = tree_map_only(
            Tensor, lambda x: on_cpu(x, x.dtype).requires_grad_(x.requires_grad), (args, kwargs)
        )
        choice: int = torch._fused_sdp_choice(*given, **options)
    return choice


def on_cpu(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of these sizes on the CPU, which no mode sees, and whose memory is never touched."""
    with torch._C._DisableTorchDispatch():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
