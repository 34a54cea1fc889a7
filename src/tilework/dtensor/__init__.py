"""DTensor: one tensor over the ranks of a mesh, with torch's operators on it."""

from tilework.dtensor import dispatch, optimizing, questions, rules, uncompiled
from tilework.dtensor.converting import to_dtensor, to_sharded
from tilework.dtensor.creation import empty, full, ones, rand, randn, zeros
from tilework.dtensor.distributing import distribute_tensor
from tilework.dtensor.explaining import GatherWarning, explain, strict
from tilework.dtensor.local_map import local_map
from tilework.dtensor.module import distribute_module
from tilework.dtensor.random import manual_seed
from tilework.dtensor.redistribution import plan_redistribution
from tilework.dtensor.registry import register_rule
from tilework.dtensor.showing import show
from tilework.dtensor.tensor import DTensor
from tilework.layout import Partial, Placement, Replicate, Shard
from tilework.mesh import DeviceMesh, init_device_mesh

__all__ = [
    "DTensor",
    "DeviceMesh",
    "GatherWarning",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "explain",
    "full",
    "init_device_mesh",
    "local_map",
    "manual_seed",
    "ones",
    "plan_redistribution",
    "rand",
    "randn",
    "register_rule",
    "show",
    "strict",
    "to_dtensor",
    "to_sharded",
    "zeros",
]

del dispatch, optimizing, questions, rules, uncompiled
