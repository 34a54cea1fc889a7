"""Models in parallel: data parallelism on replicas, tensor parallelism from a plan."""

from tilework.parallel import comm_hooks
from tilework.parallel.comm_hooks.bucket import GradBucket
from tilework.parallel.data_parallel.buckets import compute_bucket_assignment_by_size
from tilework.parallel.data_parallel.ddp import DistributedDataParallel, MixedPrecision
from tilework.parallel.data_parallel.join import Join, Joinable, JoinHook
from tilework.parallel.loss import loss_parallel
from tilework.parallel.plans import parallelize_module
from tilework.parallel.preparing import (
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
)
from tilework.parallel.styles import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
)
from tilework.parallel.sync_batch_norm import SyncBatchNorm

__all__ = [
    "ColwiseParallel",
    "DistributedDataParallel",
    "GradBucket",
    "Join",
    "JoinHook",
    "Joinable",
    "MixedPrecision",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "SyncBatchNorm",
    "comm_hooks",
    "compute_bucket_assignment_by_size",
    "loss_parallel",
    "parallelize_module",
]
