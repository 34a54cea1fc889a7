"""The core that DTensor and ShardedTensor share: the base class, factor maps, rules."""

from tilework.tiled.box_propagation import (
    LocalOp,
    NotLocal,
    Obstacle,
    TileRanges,
    propagate_boxes,
    shape_of,
    within,
)
from tilework.tiled.factors import (
    Dim,
    DimFactors,
    Factor,
    FactorMap,
    Pattern,
    broadcast,
    broadcast_shape,
    dim_factors,
    factors_of,
    volume,
)
from tilework.tiled.normalize import normalized, torch_arguments
from tilework.tiled.op_rules import (
    Arg,
    Decomposition,
    LocalCall,
    LocalRanges,
    OpCall,
    RuleFunction,
    RuleResult,
    composed,
    local_call,
    match_pattern,
    unchanged,
)
from tilework.tiled.op_table import (
    Handler,
    OpEntry,
    aten_parameters,
    canonical_name,
    dtensor_handler,
    dtensor_rule,
    entry_of,
    find,
    override_rule,
    packet_of,
    register,
    schemas_of,
)
from tilework.tiled.tiled_tensor import TiledTensor, is_called_within
