"""Names that the other packages of tilework use, besides the public names."""

from tilework.layout.box import Ints, trusted_box, whole_box
from tilework.layout.box_index import BoxIndex
from tilework.layout.cost import DEFAULT_COST, AxisChange
from tilework.layout.placements import check_placements, native_placement, order_in, placements_in
from tilework.layout.sharding import (
    Splits,
    axes_of,
    box_at,
    existing_dim,
    infer_splits,
    normal_layout,
    shard_at,
    shard_extents,
    shards,
    splits_of,
)
from tilework.layout.tiling import trusted_tile, trusted_tiling
from tilework.layout.torch_callers import called_by_torch, refuse_torch_caller
from tilework.layout.transfer_plans import replicated_tiling, transfer_plan
from tilework.layout.whole_numbers import whole_number, whole_numbers
