"""Geometry of sharded tensors, in pure integers: boxes, tilings, and plans to move between them.

There are two planners. :func:`plan` goes from any tiling to any other: the boxes that a rank sends
and receives. :func:`redistribution_steps` goes from one layout on a mesh to another: the cheapest
sequence of collectives along axes, which can be differentiated. Both take their prices from
:class:`CostModel`. See docs/architecture/layout.md.
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
