"""Hooks by the names in torch's enumeration."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from tilework.parallel.comm_hooks.hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    noop_hook,
    post_localSGD_hook,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from tilework.parallel.comm_hooks.powersgd import (
    PowerSGDState,
    batched_powerSGD_hook,
    powerSGD_hook,
)


class DDPCommHookType(enum.Enum):
    """The hooks that :func:`register_ddp_comm_hook` knows."""

    ALLREDUCE = "allreduce_hook"
    FP16_COMPRESS = "fp16_compress_hook"
    BF16_COMPRESS = "bf16_compress_hook"
    QUANTIZE_PER_TENSOR = "quantization_pertensor_hook"
    QUANTIZE_PER_CHANNEL = "quantization_perchannel_hook"
    POWER_SGD = "powerSGD_hook of rank 1"
    POWER_SGD_RANK2 = "powerSGD_hook of rank 2"
    BATCHED_POWER_SGD = "batched_powerSGD_hook of rank 1"
    BATCHED_POWER_SGD_RANK2 = "batched_powerSGD_hook of rank 2"
    NOOP = "noop_hook"
    POST_LOCAL_SGD = "post_localSGD_hook"


_Kind = DDPCommHookType
_HOOKS: dict[DDPCommHookType, Callable[..., Any]] = {
    _Kind.ALLREDUCE: allreduce_hook,
    _Kind.FP16_COMPRESS: fp16_compress_hook,
    _Kind.BF16_COMPRESS: bf16_compress_hook,
    _Kind.QUANTIZE_PER_TENSOR: quantization_pertensor_hook,
    _Kind.QUANTIZE_PER_CHANNEL: quantization_perchannel_hook,
    _Kind.POWER_SGD: powerSGD_hook,
    _Kind.POWER_SGD_RANK2: powerSGD_hook,
    _Kind.BATCHED_POWER_SGD: batched_powerSGD_hook,
    _Kind.BATCHED_POWER_SGD_RANK2: batched_powerSGD_hook,
    _Kind.NOOP: noop_hook,
    _Kind.POST_LOCAL_SGD: post_localSGD_hook,
}
_RANKS = {
    _Kind.POWER_SGD: 1,
    _Kind.POWER_SGD_RANK2: 2,
    _Kind.BATCHED_POWER_SGD: 1,
    _Kind.BATCHED_POWER_SGD_RANK2: 2,
}


def register_ddp_comm_hook(comm_hook_type: DDPCommHookType, model: Any, state: Any = None) -> None:
    """Register a hook by name: ``model.register_comm_hook(state, hook)``. Local.

    Args:
        comm_hook_type: The hook.
        model: A DistributedDataParallel.
        state: The hook's first argument: for most hooks a group, or None for the default group.
            For POST_LOCAL_SGD it is a PostLocalSGDState. For PowerSGD it is a PowerSGDState, or the
            group for which this function makes a PowerSGDState.

    Raises:
        TypeError: ``comm_hook_type`` is not a member of DDPCommHookType.

    Example:
        >>> import torch
        >>> from tilework.parallel import DistributedDataParallel
        >>> from tilework.parallel.comm_hooks import DDPCommHookType, register_ddp_comm_hook
        >>> from tilework.testing import run_ranks
        >>> def program(rank):
        ...     model = DistributedDataParallel(torch.nn.Linear(1, 1))
        ...     register_ddp_comm_hook(DDPCommHookType.FP16_COMPRESS, model)
        ...     return model.get_ddp_logging_data()["comm_hook"]
        >>> run_ranks(1, program)
        ['fp16_compress_hook']
    """
    if not isinstance(comm_hook_type, DDPCommHookType):
        raise TypeError(
            f"register_ddp_comm_hook takes a member of DDPCommHookType, got {comm_hook_type!r}; "
            f"model.register_comm_hook(state, hook) takes any hook"
        )
    rank = _RANKS.get(comm_hook_type)
    if rank is not None and not isinstance(state, PowerSGDState):
        state = PowerSGDState(process_group=state, matrix_approximation_rank=rank)
    model.register_comm_hook(state, _HOOKS[comm_hook_type])
