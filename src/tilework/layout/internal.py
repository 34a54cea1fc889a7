"""Names that the other packages of tilework use, besides the public names."""

from tilework.layout.box import (
    Cut,
    Ints,
    Ranges,
    SeveralRangesError,
    Splits,
    all_shard_sizes,
    axes_of,
    box_at,
    boxes_at,
    infer_splits,
    is_dealt,
    packed,
    ranges_at,
    replaced,
    shard_at,
    shard_extents,
    shard_sizes,
    shards,
    size_at,
    trusted_box,
    whole_box,
    whole_number,
    whole_numbers,
    with_span,
)
from tilework.layout.box_columns import BoxIndex
from tilework.layout.cost import DEFAULT_COST, AxisChange
from tilework.layout.placements import (
    called_by_torch,
    check_placements,
    native_placement,
    order_in,
    placements_in,
    refuse_torch_caller,
    shard_of,
)
from tilework.layout.planning import replicated_tiling, transfer_plan
from tilework.layout.sharding import existing_dim, flat_mesh, normal_form
from tilework.layout.tiling import trusted_tile, trusted_tiling
