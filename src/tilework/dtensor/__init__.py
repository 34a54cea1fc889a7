"""DTensor: one tensor over the ranks of a mesh, with torch's operators on it."""

from typing import TYPE_CHECKING, Any

from tilework.dtensor import optimizers, rules, tracing
from tilework.dtensor.autograd import local_graph, torch_backward
from tilework.dtensor.construction.creation import arange, empty, full, ones, rand, randn, zeros
from tilework.dtensor.construction.distribute import distribute_tensor
from tilework.dtensor.debug.causes import CollectiveEvent, EventLog, GatherWarning, explain, strict
from tilework.dtensor.dispatch import call, foreach, tensor_attributes
from tilework.dtensor.like_torch import (
    CommDebugMode,
    compute_local_shape_and_global_offset,
    from_callback,
    implicit_replication,
    local_box,
    visualize_sharding,
)
from tilework.dtensor.local_map import local_map
from tilework.dtensor.module import distribute_module, module_from_torch, module_to_torch
from tilework.dtensor.propagation.register_rule import register_rule
from tilework.dtensor.provenance.content import verifying
from tilework.dtensor.random import distributions
from tilework.dtensor.random.generator import manual_seed
from tilework.dtensor.redistribution.redistribute import plan_redistribution
from tilework.dtensor.register_sharding import register_sharding
from tilework.dtensor.rules.attention_ways import context_parallel
from tilework.dtensor.show import show
from tilework.dtensor.tensor import DTensor
from tilework.dtensor.verify import verify
from tilework.from_torch import refuse_left_out
from tilework.late_names import late_name
from tilework.layout import Partial, Placement, Replicate, Shard
from tilework.mesh import DeviceMesh, init_device_mesh

if TYPE_CHECKING:
    #: Names of packages above; see ``tilework.late_names``.
    capture: Any
    to_dtensor: Any
    to_sharded: Any

__all__ = [
    "CollectiveEvent",
    "CommDebugMode",
    "DTensor",
    "DeviceMesh",
    "EventLog",
    "GatherWarning",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "arange",
    "capture",
    "compute_local_shape_and_global_offset",
    "context_parallel",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "explain",
    "from_callback",
    "full",
    "implicit_replication",
    "init_device_mesh",
    "local_box",
    "local_map",
    "manual_seed",
    "module_from_torch",
    "module_to_torch",
    "ones",
    "plan_redistribution",
    "rand",
    "randn",
    "register_rule",
    "register_sharding",
    "show",
    "strict",
    "to_dtensor",
    "to_sharded",
    "verify",
    "verifying",
    "visualize_sharding",
    "zeros",
]

del call, distributions, foreach, local_graph, optimizers, rules, tracing
del tensor_attributes, torch_backward


if not TYPE_CHECKING:  # a type checker would then accept any name

    def __getattr__(name: str) -> Any:
        """Import a name of a package above on first use."""
        if name in ("capture", "to_dtensor", "to_sharded"):
            return late_name("dtensor", name)
        refuse_left_out(__name__, name)
