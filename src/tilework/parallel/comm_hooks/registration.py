"""Hooks by the names in torch's enumeration."""

from __future__ import annotations

import enum
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
    """The hooks that :func:`register_ddp_comm_hook` knows: each with the rank of PowerSGD, or 0."""

    ALLREDUCE = allreduce_hook, 0
    FP16_COMPRESS = fp16_compress_hook, 0
    BF16_COMPRESS = bf16_compress_hook, 0
    QUANTIZE_PER_TENSOR = quantization_pertensor_hook, 0
    QUANTIZE_PER_CHANNEL = quantization_perchannel_hook, 0
    POWER_SGD = powerSGD_hook, 1
    POWER_SGD_RANK2 = powerSGD_hook, 2
    BATCHED_POWER_SGD = batched_powerSGD_hook, 1
    BATCHED_POWER_SGD_RANK2 = batched_powerSGD_hook, 2
    NOOP = noop_hook, 0
    POST_LOCAL_SGD = post_localSGD_hook, 0


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

    Example::

        register_ddp_comm_hook(DDPCommHookType.FP16_COMPRESS, model)
    """
    if not isinstance(comm_hook_type, DDPCommHookType):
        raise TypeError(
            f"register_ddp_comm_hook takes a member of DDPCommHookType, got {comm_hook_type!r}; "
            f"model.register_comm_hook(state, hook) takes any hook"
        )
    hook, rank = comm_hook_type.value
    if rank and not isinstance(state, PowerSGDState):
        state = PowerSGDState(process_group=state, matrix_approximation_rank=rank)
    model.register_comm_hook(state, hook)
