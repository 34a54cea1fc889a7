"""Geometry of sharded tensors, in pure integers: boxes, tilings, and plans to move between them."""

from tilework.layout.box import Box
from tilework.layout.chunking import chunk_offsets, chunk_size, chunk_sizes, offsets_of
from tilework.layout.collective import Collective
from tilework.layout.cost import CostModel
from tilework.layout.inference import infer_chunking
from tilework.layout.moves import Piece
from tilework.layout.placements import Layout, Partial, Placement, Replicate, Shard
from tilework.layout.planning import Plan, plan
from tilework.layout.sharding import chunk_tiling, mesh_tiling
from tilework.layout.steps import Step, Steps, redistribution_steps
from tilework.layout.tiling import Tile, Tiling
from tilework.layout.validation import check_boxes, check_disjoint, find_overlap
from tilework.layout.whole_plan import WholePlan, whole

__all__ = [
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
    "WholePlan",
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
    "redistribution_steps",
    "whole",
]
