"""Names of torch.distributed, and the modules of tilework that have them, or why none has.

A name that tilework leaves out on purpose raises an error where a user of torch looks for it. The
error says what to use instead. ``python -m tests.torch_names`` writes docs/how-to/left-out.md from
:data:`LEFT_OUT`.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

#: The modules here that have the names of torch's modules.
MODULES: Final = {
    "torch.distributed": "tilework.distributed",
    "torch.distributed.distributed_c10d": "tilework.distributed.distributed_c10d",
    "torch.distributed._functional_collectives": "tilework.distributed.functional",
    "torch.distributed.nn.functional": "tilework.distributed.nn.functional",
    "torch.distributed.device_mesh": "tilework.mesh",
    "torch.distributed.tensor": "tilework.dtensor",
    "torch.distributed.tensor.debug": "tilework.dtensor",
    "torch.distributed.tensor.experimental": "tilework.dtensor",
    "torch.distributed.tensor.parallel": "tilework.parallel",
    "torch.distributed.tensor.placement_types": "tilework.dtensor",
    "torch.distributed.fsdp": "tilework.parallel",
    "torch.nn.parallel": "tilework.parallel",
    "torch.distributed.algorithms.join": "tilework.parallel",
    "torch.distributed.algorithms.ddp_comm_hooks": "tilework.parallel.comm_hooks",
    "torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks": "tilework.parallel.comm_hooks",
    "torch.distributed.algorithms.ddp_comm_hooks.default_hooks": "tilework.parallel.comm_hooks",
    "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook": (
        "tilework.parallel.comm_hooks"
    ),
    "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook": "tilework.parallel.comm_hooks",
    "torch.distributed.algorithms.model_averaging.averagers": "tilework.parallel",
    "torch.distributed.algorithms.model_averaging.hierarchical_model_averager": (
        "tilework.parallel"
    ),
    "torch.distributed.algorithms.model_averaging.utils": "tilework.parallel",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper": "tilework.parallel",
    "torch.distributed.optim": "tilework.parallel",
    "torch.distributed.checkpoint": "tilework.checkpoint",
    "torch.distributed.checkpoint.stateful": "tilework.checkpoint",
    "torch.distributed.checkpoint.state_dict": "tilework.checkpoint.state_dict",
    "torch.distributed.rpc": "tilework.rpc",
    "torch.distributed.remote_device": "tilework.sharded",
    "torch.distributed._shard.api": "tilework.sharded",
    "torch.distributed._shard.sharded_tensor": "tilework.sharded",
    "torch.distributed._shard.sharding_spec": "tilework.sharded",
    "torch.distributed._shard.sharding_plan": "tilework.sharded",
    "torch.distributed._shard.sharded_optim": "tilework.sharded",
    "torch.multiprocessing": "tilework.launch",
    "torch.utils.data.distributed": "tilework.data",
}


@dataclass(frozen=True)
class LeftOut:
    """Names of a torch module that tilework leaves out on purpose, all for the same reason."""

    #: Where a user looks for them here.
    package: str
    #: torch's module.
    module: str
    #: The names in that module, of functions, classes and inner modules.
    names: tuple[str, ...]
    #: The reason, as a clause for the error.
    why: str
    #: What to use instead.
    instead: str

    def message(self, name: str) -> str:
        """The error's text: why tilework has no ``name``, and what to use instead."""
        return (
            f"{self.package} has no {name}, which {self.module} has: {self.why}. Use {self.instead}"
        )


_FSDP1 = "FSDP1's wrapper has a successor, in torch as well"
_PLUG_INS = "what a checkpoint holds and who writes it is planned inside"
_ELASTIC = "the launcher is one program, without parts to plug in"

#: By the package here and torch's module: names; why there are none, and what to use instead.
_LEFT_OUT: Final[Sequence[tuple[str, str, dict[str, tuple[str, str]]]]] = (
    ("tilework.parallel", "torch.distributed.fsdp", {
        "FullyShardedDataParallel FSDP":
            (_FSDP1,
             "fully_shard(module) for each block and then for the model; or torch's own class "
             'after torch.distributed.init_process_group("tilework")'),
        "ShardingStrategy":
            (_FSDP1,
             "fully_shard(…, reshard_after_forward=True) for FULL_SHARD, False for "
             "SHARD_GRAD_OP, a mesh of two axes for HYBRID_SHARD, and DistributedDataParallel "
             "for NO_SHARD"),
        "BackwardPrefetch": (_FSDP1, "module.set_modules_to_backward_prefetch([…])"),
        "CPUOffload": (_FSDP1, "fully_shard(…, offload_policy=CPUOffloadPolicy())"),
        ("StateDictType FullStateDictConfig ShardedStateDictConfig LocalStateDictConfig "
         "FullOptimStateDictConfig ShardedOptimStateDictConfig LocalOptimStateDictConfig "
         "StateDictConfig OptimStateDictConfig StateDictSettings OptimStateKeyType"):
            (_FSDP1,
             "model.state_dict(), which has DTensors, and full_tensor() of each; or "
             "tilework.checkpoint"),
    }),
    ("tilework.parallel", "torch.distributed.fsdp.wrap", {
        ("ModuleWrapPolicy CustomPolicy always_wrap_policy lambda_auto_wrap_policy "
         "transformer_auto_wrap_policy size_based_auto_wrap_policy enable_wrap wrap"):
            ("there is no wrapper to be put around modules by a policy",
             "a loop: for block in model.modules(): if isinstance(block, Block): "
             "fully_shard(block)"),
    }),
    ("tilework.parallel", "torch.distributed.fsdp.sharded_grad_scaler", {
        "ShardedGradScaler":
            ("ranks agree about infinite gradients of sharded parameters by themselves",
             'torch.amp.GradScaler("cpu")'),
    }),
    ("tilework.parallel", "torch.nn.parallel", {
        "DataParallel DistributedDataParallelCPU":
            ("one process that drives several devices is no group of ranks, and slower",
             "DistributedDataParallel, with one rank for each device"),
    }),
    ("tilework.parallel", "torch.distributed._composable", {
        "replicate":
            ("a module's parameters are replicated by one class",
             "DistributedDataParallel(module)"),
    }),
    ("tilework.parallel", "torch.distributed.optim", {
        "_apply_optimizer_in_backward _get_in_backward_optimizers":
            ("an optimizer's step within backward saves memory that fully_shard does not hold",
             "fully_shard, or parameter.register_post_accumulate_grad_hook on it"),
        "DistributedOptimizer":
            ("it steps over distributed autograd, which is left out",
             "an optimizer on each rank, or ZeroRedundancyOptimizer"),
    }),
    ("tilework.parallel", "torch.distributed.algorithms._comm_hooks.default_hooks", {
        "LowPrecisionState DefaultState":
            (_FSDP1, "fully_shard(…, mp_policy=MixedPrecisionPolicy(reduce_dtype=…))"),
    }),
    ("tilework.parallel", "torch.distributed.algorithms._checkpoint.checkpoint_wrapper", {
        "offload_wrapper OffloadWrapper":
            ("activations are on the CPU as they are",
             "checkpoint_wrapper, which computes them again"),
    }),
    ("tilework.dtensor", "torch.distributed.tensor.experimental", {
        "context_parallel_unshard set_rotate_method":
            ("attention takes inputs that are sharded along the sequence as they are",
             "parallelize_module(model, mesh, ContextParallel()), or distribute_tensor(x, mesh, "
             "[Shard(sequence_dim)]); tilework.dtensor.context_parallel(way) chooses how "
             "attention runs"),
    }),
    ("tilework.dtensor", "torch.distributed.tensor.placement_types", {
        "_StridedShard":
            ("the order in which axes divide a dim is a property of the layout",
             "distribute_tensor(…, order=(…)), or redistribute(…, order=(…))"),
        "_MaskPartial":
            ("embeddings whose rows are sharded need no placement of their own", "Partial"),
    }),
    ("tilework.dtensor", "torch.distributed.tensor._op_schema", {
        "OpSchema OpStrategy OutputSharding TupleStrategy PlacementStrategy OpSpec":
            ("an operator's sharding is a rule of one line",
             'register_rule(operator, "…"), or register_sharding(operator)'),
    }),
    ("tilework.checkpoint", "torch.distributed.checkpoint", {
        ("DefaultSavePlanner DefaultLoadPlanner SavePlanner LoadPlanner SavePlan LoadPlan "
         "ReadItem WriteItem"):
            (_PLUG_INS, "load(…, names=…, map_names=…) for a part, or under other names"),
        "FileSystemReader FileSystemWriter StorageReader StorageWriter FsspecReader FsspecWriter":
            (_PLUG_INS,
             "a folder, or a URL that fsspec knows, as the path; convert(…) reads torch's "
             "folders"),
        "AsyncStager BlockingAsyncStager DefaultStager StagingOptions":
            ("async_save copies what it needs itself", "async_save(…)"),
        "save_state_dict load_state_dict":
            ("torch has deprecated them", "save(state, path) and load(path, into=state)"),
    }),
    ("tilework.distributed", "torch.distributed", {
        "Reducer Logger":
            ("they are inside DistributedDataParallel",
             "DistributedDataParallel(…).report() and get_ddp_logging_data()"),
        "ProcessGroupGloo ProcessGroupNCCL ProcessGroupMPI ProcessGroupUCC":
            ("torch's engines are made behind the contract of groups",
             'init_process_group("gloo") and so on, or new_group(backend="gloo")'),
        "autograd":
            ("no other part keeps gradients across remote calls, and torch advises against it",
             "tilework.distributed.functional, whose collectives are differentiable"),
        "_symmetric_memory":
            ("torch has it for GPUs alone",
             "group.empty(…): tensors in the group's segment, which peers read in place"),
    }),
    ("tilework.rpc", "torch.distributed.nn", {
        "RemoteModule":
            ("it trains by distributed autograd, which is left out",
             "rpc.remote(worker, module_class), whose RRef calls methods there"),
    }),
    ("tilework.launch", "torch.distributed.launcher", {
        "elastic_launch LaunchConfig launch_agent":
            (_ELASTIC, "spawn(function, args=…, nprocs=…), or `tilework run`"),
    }),
    ("tilework.launch", "torch.multiprocessing", {
        "start_processes ProcessContext SpawnContext":
            ("there is one function that starts ranks",
             "spawn(function, args=…, nprocs=…, start_method=…, join=…)"),
    }),
    ("tilework.launch", "torch.distributed.elastic", {
        ("ElasticAgent LocalElasticAgent WorkerSpec RendezvousHandler RendezvousParameters "
         "LogsSpecs DefaultLogsSpecs"):
            (_ELASTIC, "`tilework run --restarts`, and tilework.parallel.Resilient"),
    }),
)  # fmt: skip

LEFT_OUT: Final[Sequence[LeftOut]] = tuple(
    LeftOut(package, module, tuple(names.split()), why, instead)
    for package, module, rows in _LEFT_OUT
    for names, (why, instead) in rows.items()
)


@dataclass(frozen=True)
class TorchDifferences:
    """Names, members and keywords that torch has and tilework leaves out, with the reason."""

    #: The package of tilework in which a user looks for them.
    package: str
    #: ``name``, ``Class.member`` or ``function(keyword)``; ``*`` stands for anything.
    names: tuple[str, ...]
    #: The reason, as a clause for the error and the page.
    why: str


#: By the package here: names, and the reason.
_DIFFERENCES: Final[Sequence[tuple[str, dict[str, str]]]] = (
    ("tilework.distributed", {
        "Backend.FAKE Backend.XCCL": "there are no such backends",
        "Backend.backend_type_map Backend.default_device_backend_map":
            "numbers of torch's C++; `get_default_backend_for_device(device)` names the default",
        "*Options.rootTensor *Options.device_ids *Options.device":
            "one class of options serves all operations, and they take one tensor",
        ("ProcessGroup.BackendType ProcessGroup.CUSTOM ProcessGroup.GLOO ProcessGroup.MPI "
         "ProcessGroup.NCCL ProcessGroup.UCC ProcessGroup.UNDEFINED ProcessGroup.XCCL "
         "ProcessGroupGloo"): "numbers of torch's C++; `get_backend(group)` is a name",
        ("*.boxed *.unbox ProcessGroup.use_pg_for_symm_mem_rendezvous ReduceOp.op "
         "Work.get_future_result GroupName GradBucket BuiltinCommHookType DebugLevel.*"):
            "of torch's own C++ and compiler; the bucket of hooks is "
            "`tilework.parallel.GradBucket`",
        "ProcessGroup.get_group_store":
            "`get_default_store()` is the store; groups have prefixes in it",
        "ProcessGroup.merge_remote_group":
            "groups grow by `grow_group`, with ranks that were started again",
        "ProcessGroup.split_group": "the function `split_group(group, …)` says the same",
        "TCPStore.libuvBackend": "there is one kind of server",
        "init_process_group(_ranks)": "private to torch's own tests",
    }),
    ("tilework.distributed.functional", {
        ("*_backward *_setup_context *_inplace legacy_* *_ctx backend_impl get_proxy_mode "
         "is_torchdynamo_compiling AsyncCollectiveTensor.* DeviceMesh custom_op fake_impl "
         "resolve_* return_and_correct_aliasing tree_map_only"):
            "of the way in which torch registers and traces its own operators",
    }),
    ("tilework.distributed.nn.functional", {
        "Function group": "imported there, and not of it",
    }),
    ("tilework.distributed", {
        ("DeviceMesh(_init_backend) DeviceMesh(_rank) DeviceMesh(_layout) DeviceMesh(_rank_map) "
         "DeviceMesh(_root_mesh)"): "private; `MeshSpec` is a mesh without groups",
    }),
    ("tilework.dtensor", {
        "context_parallel(*)":
            "it chooses the way of attention; tensors are sharded before, by `distribute_tensor`",
        "Partial.ALL_REDUCE_OPS Partial.LINEAR_REDUCE_OPS":
            "the error for an unknown reduction lists all reductions",
        "Placement.*": "`Placement` is the union of the three classes, which have these methods",
        "CommDebugMode.*":
            "it counts collectives; modules and operators are in the events of `explain()`",
    }),
    ("tilework.parallel", {
        ("FSDPModule.reset_iter_state FSDPModule.set_reduce_scatter_max_input_buffers "
         "FSDPModule.set_reduce_scatter_unused_params "
         "FSDPModule.set_separate_reduce_scatter_group FSDPModule.set_symm_mem_for_comm "
         "share_comm_ctx DataParallelMeshDims.*_names"):
            "controls of GPU streams and memory, and what torch's own code asks of a mesh",
        "MixedPrecision.cast_root_forward_inputs MixedPrecision.keep_low_precision_grads":
            "of FSDP1; the class here is DistributedDataParallel's",
        ("gather scatter parallel_apply DistributedDataParallel.gather "
         "DistributedDataParallel.scatter DistributedDataParallel.to_kwargs data_parallel"):
            "of modules on several devices of one process",
    }),
    ("tilework.parallel.comm_hooks", {
        ("*.maybe_increase_iter PowerSGDState.next_stats_report PowerSGDState.rng "
         "PowerSGDState.total_numel_*_compression"):
            "counters of the hooks themselves; `compression_stats()` counts the saved bytes",
    }),
    ("tilework.parallel", {
        "ModelAverager": "a class with `average_parameters(params)` is one",
        "*.join_device": "ranks that join inform each other on the device of their group",
        ("apply_activation_checkpointing(auto_wrap_policy) ActivationWrapper copy_method_params "
         "save_on_cpu torch_utils_checkpoint"):
            "no module is put around another one: `modules={Block}` or `check_fn=` chooses",
        "as_functional_optim": "for torch's TorchScript optimizers",
    }),
    ("tilework.checkpoint", {
        "BytesStorageMetadata ChunkStorageMetadata Metadata TensorStorageMetadata":
            "`index_of(path)` is the index of a checkpoint, and docs/format.md its format",
        "CheckpointException": "`CheckpointError`, the same on all ranks",
        "HuggingFaceStorage* QuantizedHuggingFaceStorageReader":
            "`convert(…)` and `read(…)` take safetensors files as they are",
        "load_sharded_optimizer_state_dict":
            "`load(path, into={'model': model, 'optimizer': optimizer})`",
    }),
    ("tilework.rpc", {
        "*RpcBackendOptions.* AllGatherStates BackendType method_factory new_method":
            "of torch's TensorPipe; options are fields of `RpcBackendOptions`",
        "is_available RRef.backward": "there is no distributed autograd",
    }),
    ("tilework.sharded", {
        ("allclose equal constant_ kaiming_uniform_ normal_ uniform_ sharded_embedding "
         "sharded_embedding_bag"):
            "`torch.equal`, `torch.nn.init.uniform_` and so on take ShardedTensors themselves",
        ("ShardedTensor.ProcessGroupState ChunkShardingSpec.ShardingDim DevicePlacementSpec "
         "PlacementSpec"): "of pickles and placements that nobody makes by hand",
    }),
    ("tilework.launch", {
        "*_sharing_strateg*":
            "how torch.multiprocessing shares tensors, which ranks here do through groups",
    }),
)  # fmt: skip

DIFFERENCES: Final[Sequence[TorchDifferences]] = tuple(
    TorchDifferences(package, tuple(names.split()), why)
    for package, rows in _DIFFERENCES
    for names, why in rows.items()
)

_IMPORT_FROM = dis.opmap["IMPORT_FROM"]


def refuse_left_out(package: str, name: str) -> NoReturn:
    """Raise the error that ``package`` has no ``name``, with the reason if tilework leaves it out.

    The package's own ``__getattr__`` calls this. The error is an AttributeError, so that
    ``hasattr`` works. In ``from package import name`` a name that is left out on purpose raises an
    ImportError, since Python would replace the message of an AttributeError there.

    Example:
        >>> refuse_left_out("tilework.rpc", "nothing")
        Traceback (most recent call last):
        AttributeError: module 'tilework.rpc' has no attribute 'nothing'
    """
    for row in LEFT_OUT:
        if row.package == package and name in row.names:
            asking = sys._getframe(2)
            message = row.message(name)
            if asking.f_lasti >= 0 and asking.f_code.co_code[asking.f_lasti] == _IMPORT_FROM:
                raise ImportError(message, name=name)
            raise AttributeError(message, name=name)
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
