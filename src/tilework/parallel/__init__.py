"""Models in parallel: data parallelism on replicas, tensor parallelism from a plan."""

from typing import TYPE_CHECKING, NoReturn

from tilework.from_torch import refuse_left_out
from tilework.parallel import comm_hooks
from tilework.parallel import compiler_disable as _uncompiled  # noqa: F401  # for torch.compile
from tilework.parallel.activation_checkpoint import (
    CheckpointImpl,
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from tilework.parallel.clip_grad import clip_grad_norm_
from tilework.parallel.comm_hooks.bucket import GradBucket
from tilework.parallel.data_parallel.arguments import MixedPrecision
from tilework.parallel.data_parallel.buckets import compute_bucket_assignment_by_size
from tilework.parallel.data_parallel.ddp import DistributedDataParallel
from tilework.parallel.data_parallel.join import Join, Joinable, JoinHook
from tilework.parallel.diloco import DiLoCo
from tilework.parallel.fully_sharded.fully_shard import fully_shard
from tilework.parallel.fully_sharded.module import (
    FSDPModule,
    UnshardHandle,
    register_fsdp_forward_method,
)
from tilework.parallel.fully_sharded.policies import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from tilework.parallel.model_averaging import (
    HierarchicalModelAverager,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    average_parameters,
    average_parameters_or_parameter_groups,
    get_params_to_average,
)
from tilework.parallel.pipelines.schedule import Schedule
from tilework.parallel.pipelines.stages import Stages, pipeline
from tilework.parallel.resilient.training_loop import Event, Resilient
from tilework.parallel.sync_batch_norm import SyncBatchNorm
from tilework.parallel.tensor_parallel.context_style import ContextParallel
from tilework.parallel.tensor_parallel.deriving import DerivedPlan, derive_plan, parallelize
from tilework.parallel.tensor_parallel.experts import (
    ExpertLoad,
    ExpertParallel,
    ExpertReport,
    balance_loss,
    expert_report,
)
from tilework.parallel.tensor_parallel.plans import loss_parallel, parallelize_module
from tilework.parallel.tensor_parallel.styles import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from tilework.parallel.zero_redundancy import ZeroRedundancyOptimizer

__all__ = [
    "CPUOffloadPolicy",
    "CheckpointImpl",
    "CheckpointWrapper",
    "ColwiseParallel",
    "ContextParallel",
    "DataParallelMeshDims",
    "DerivedPlan",
    "DiLoCo",
    "DistributedDataParallel",
    "Event",
    "ExpertLoad",
    "ExpertParallel",
    "ExpertReport",
    "FSDPModule",
    "GradBucket",
    "HierarchicalModelAverager",
    "Join",
    "JoinHook",
    "Joinable",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ParallelStyle",
    "PeriodicModelAverager",
    "PostLocalSGDOptimizer",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "Resilient",
    "RowwiseParallel",
    "Schedule",
    "SequenceParallel",
    "Stages",
    "SyncBatchNorm",
    "UnshardHandle",
    "ZeroRedundancyOptimizer",
    "apply_activation_checkpointing",
    "average_parameters",
    "average_parameters_or_parameter_groups",
    "balance_loss",
    "checkpoint_wrapper",
    "clip_grad_norm_",
    "comm_hooks",
    "compute_bucket_assignment_by_size",
    "derive_plan",
    "expert_report",
    "fully_shard",
    "get_params_to_average",
    "loss_parallel",
    "parallelize",
    "parallelize_module",
    "pipeline",
    "register_fsdp_forward_method",
]


if not TYPE_CHECKING:  # type checkers would take any name as defined

    def __getattr__(name: str) -> NoReturn:
        """Raise for a name that the package lacks."""
        refuse_left_out(__name__, name)
