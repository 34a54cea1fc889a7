"""Rules of operators that hold for shards of any kind, by family. Importing them registers them."""

from tilework.tiled.rules import (
    convolution,
    dim_ops,
    elementwise,
    embedding,
    kernels,
    linalg,
    linear,
    losses,
    rearranging,
    reductions,
    reshaping,
)
from tilework.tiled.rules.convolution import CONVOLUTIONS, POOLS, guard_empty_shards, per_dim
from tilework.tiled.rules.elementwise import pointwise
from tilework.tiled.rules.embedding import LocalIndexRange
from tilework.tiled.rules.empty_shards import (
    allow_empty_shards,
    cat_shards,
    keep_inputs_in_graph,
    with_row_for_empty,
    zero_addend,
)
from tilework.tiled.rules.linear import call_on_meta
from tilework.tiled.rules.losses import MEAN, NONE, SUM, reduce_loss
from tilework.tiled.rules.rearranging import SPLITS, cat_dim, cat_shape, split_lengths, with_item
from tilework.tiled.rules.reduction_args import (
    accumulation_dtype,
    any_sharded,
    dims_of,
    reduce_dims,
    remaining_dims,
)
from tilework.tiled.rules.reductions import extreme_dims, register_spreads, softmax_dims
from tilework.tiled.rules.reshaping import SWAPAXES, common_shape, dim_at, sizes_of
