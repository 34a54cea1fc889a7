"""Communication hooks: other ways to reduce the gradients of a bucket than an average."""

from tilework.parallel.comm_hooks.bucket import CommHook, GradBucket
from tilework.parallel.comm_hooks.hooks import (
    PostLocalSGDState,
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
    noop_hook,
    post_localSGD_hook,
    quantization_perchannel_hook,
    quantization_pertensor_hook,
)
from tilework.parallel.comm_hooks.powersgd import (
    CompressionStats,
    PowerSGDState,
    batched_powerSGD_hook,
    orthogonalize,
    powerSGD_hook,
)
from tilework.parallel.comm_hooks.registration import DDPCommHookType, register_ddp_comm_hook
from tilework.parallel.comm_hooks.slow_links import SlowLinks, slow_links_hook

__all__ = [
    "CommHook",
    "CompressionStats",
    "DDPCommHookType",
    "GradBucket",
    "PostLocalSGDState",
    "PowerSGDState",
    "SlowLinks",
    "allreduce_hook",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "hook_with_zero_step",
    "hook_with_zero_step_interleaved",
    "noop_hook",
    "orthogonalize",
    "post_localSGD_hook",
    "powerSGD_hook",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
    "register_ddp_comm_hook",
    "slow_links_hook",
]
