"""ShardedTensor: tensors in shards of any shape on any ranks, and their operations."""

from tilework.sharded import ops as _ops  # noqa: F401  # for the table
from tilework.sharded.base import ShardedTensorBase
from tilework.sharded.checks import parse_and_validate_remote_device
from tilework.sharded.creation import (
    arange,
    empty,
    from_full_tensor,
    full,
    init_from_local_shards,
    ones,
    rand,
    randn,
    zeros,
)
from tilework.sharded.metadata import (
    RemoteDevice,
    Shard,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorProperties,
)
from tilework.sharded.optim import ShardedOptimizer, named_params_with_sharded_tensor
from tilework.sharded.registry import custom_sharded_op_impl, custom_sharding_spec_op
from tilework.sharded.shard_tensor import PartialCoverError, shard_parameter, shard_tensor
from tilework.sharded.sharding_plan import (
    Sharder,
    ShardingPlan,
    ShardingPlanner,
    collect_local_shard,
    reshard_output,
    shard_module,
)
from tilework.sharded.show import show
from tilework.sharded.specs import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardingSpec,
    infer_sharding_spec_from_shards_metadata,
    validate_non_overlapping_shards_metadata,
)
from tilework.sharded.state_dict import pre_load_state_dict_hook, state_dict_hook
from tilework.sharded.tensor import ShardedTensor, load_with_process_group
from tilework.tiled import TiledTensor

__all__ = [
    "ChunkShardingSpec",
    "EnumerableShardingSpec",
    "PartialCoverError",
    "RemoteDevice",
    "Shard",
    "ShardMetadata",
    "ShardedOptimizer",
    "ShardedTensor",
    "ShardedTensorBase",
    "ShardedTensorMetadata",
    "Sharder",
    "ShardingPlan",
    "ShardingPlanner",
    "ShardingSpec",
    "TensorProperties",
    "TiledTensor",
    "arange",
    "collect_local_shard",
    "custom_sharded_op_impl",
    "custom_sharding_spec_op",
    "empty",
    "from_full_tensor",
    "full",
    "infer_sharding_spec_from_shards_metadata",
    "init_from_local_shards",
    "load_with_process_group",
    "named_params_with_sharded_tensor",
    "ones",
    "parse_and_validate_remote_device",
    "pre_load_state_dict_hook",
    "rand",
    "randn",
    "reshard_output",
    "shard_module",
    "shard_parameter",
    "shard_tensor",
    "show",
    "state_dict_hook",
    "validate_non_overlapping_shards_metadata",
    "zeros",
]
