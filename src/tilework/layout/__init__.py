"""Geometry of sharded tensors, in pure integers: boxes, tilings, and plans to move between them.

A :class:`Box` is a region of a tensor, a :class:`Tiling` says which ranks hold which boxes, and
``sharding`` is the one module that knows which boxes placements on a mesh mean.

There are two planners, for two questions:

- :func:`plan` goes from any tiling to any other. It finds, for one rank, the boxes that it sends
  and receives, and the equivalent collective, if there is one. ShardedTensor, whose shards may be
  anywhere, uses only this planner; a mesh needs it where no sequence of collectives is cheap.
- :func:`redistribution_steps` goes from one layout on a mesh to another. It searches for the
  cheapest sequence of collectives along the mesh's axes. The sequence is found without looking at
  boxes, runs without packing, and can be differentiated and printed step by step. One kind of step
  is a plan.

Both take their prices from :class:`CostModel`, and so does the choice of layouts for operators.
"""

from tilework.layout.box import (
    Box,
    chunk_offsets,
    chunk_size,
    chunk_sizes,
    infer_chunking,
    offsets_of,
)
from tilework.layout.collective import Collective
from tilework.layout.cost import CostModel
from tilework.layout.placements import Layout, Partial, Placement, Replicate, Shard
from tilework.layout.planning import AllRanksPlan, Plan, plan, plan_all_ranks
from tilework.layout.sharding import chunk_tiling, mesh_tiling
from tilework.layout.steps import Step, Steps, redistribution_steps
from tilework.layout.tile_transfers import Piece
from tilework.layout.tiling import Tile, Tiling, check_boxes, check_disjoint, find_overlap

__all__ = [
    "AllRanksPlan",
    "Box",
    "Collective",
    "CostModel",
    "Layout",
    "Partial",
    "Piece",
    "Placement",
    "Plan",
    "Replicate",
    "Shard",
    "Step",
    "Steps",
    "Tile",
    "Tiling",
    "check_boxes",
    "check_disjoint",
    "chunk_offsets",
    "chunk_size",
    "chunk_sizes",
    "chunk_tiling",
    "find_overlap",
    "infer_chunking",
    "mesh_tiling",
    "offsets_of",
    "plan",
    "plan_all_ranks",
    "redistribution_steps",
]
