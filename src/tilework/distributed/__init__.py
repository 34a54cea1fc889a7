"""torch.distributed's public names, over tilework's own groups, stores and rendezvous.

    import tilework.distributed as dist

Names that torch spells with a leading underscore although users need them are public here
without it (``store_based_barrier``, ``get_default_group``, ``make_premul_sum``, …).
"""

from typing import TYPE_CHECKING, Any

from tilework.comm.backends.internal import (
    Backend,
    BackendConfig,
    DistributedBackendOptions,
    HybridOptions,
    get_default_backend_for_device,
    is_backend_available,
    is_gloo_available,
    is_mpi_available,
    is_nccl_available,
    is_shm_available,
    is_ucc_available,
    is_xccl_available,
)
from tilework.comm.contract import (
    Options,
    ProcessGroup,
    RedOpType,
    ReduceOp,
    Work,
    make_premul_sum,
    supports_complex,
)
from tilework.comm.groups import DEFAULT_TIMEOUT as default_pg_timeout  # torch's name
from tilework.comm.groups import (
    abort_process_group,
    destroy_process_group,
    grow_group,
    init_process_group,
    new_group,
    new_subgroups,
    new_subgroups_by_enumeration,
    shrink_group,
    split_group,
)
from tilework.comm.operations import internal as operations
from tilework.comm.operations.internal import *  # noqa: F403
from tilework.comm.operations.internal import (
    CoalescedWork,
    P2POp,
    all_gather_object,
    assert_same,
    batch_isend_irecv,
    breakpoint,
    broadcast_object_list,
    coalescing_manager,
    find_stragglers,
    gather_object,
    irecv,
    isend,
    on_rank,
    recv,
    recv_object_list,
    scatter_object_list,
    send,
    send_object_list,
    span,
)
from tilework.comm.per_call.internal import (
    DebugLevel,
    Straggler,
    get_debug_level,
    record_comm,
    set_debug_level,
    set_debug_level_from_env,
)
from tilework.comm.world import (
    GroupMember,
    get_backend,
    get_backend_config,
    get_default_group,
    get_default_store,
    get_global_rank,
    get_group_rank,
    get_node_local_rank,
    get_pg_count,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    group,
    is_available,
    is_initialized,
    rank_not_in_group,
)
from tilework.distributed import distributed_c10d, nn
from tilework.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    DistNetworkError,
    DistStoreError,
    ExcludedError,
    PeerLostError,
    QueueEmptyError,
)
from tilework.from_torch import refuse_left_out
from tilework.mesh import DeviceMesh, init_device_mesh
from tilework.rendezvous import is_torchelastic_launched, register_rendezvous_handler, rendezvous
from tilework.store import (
    FileStore,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
    UnixStore,
    store_based_barrier,
)

# torch has a class of options per operation; one serves them all here.
AllgatherOptions = AllreduceOptions = AllreduceCoalescedOptions = AllToAllOptions = Options
BarrierOptions = BroadcastOptions = GatherOptions = ReduceOptions = Options
ReduceScatterOptions = ScatterOptions = Options
all_gather_single = operations.all_gather_into_tensor
reduce_scatter_single = operations.reduce_scatter_tensor

__all__ = [
    "AllToAllOptions",
    "AllgatherOptions",
    "AllreduceCoalescedOptions",
    "AllreduceOptions",
    "Backend",
    "BackendConfig",
    "BarrierOptions",
    "BroadcastOptions",
    "CoalescedWork",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "DebugLevel",
    "DeviceMesh",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "DistributedBackendOptions",
    "ExcludedError",
    "FileStore",
    "GatherOptions",
    "GroupMember",
    "HashStore",
    "HybridOptions",
    "Options",
    "P2POp",
    "PeerLostError",
    "PrefixStore",
    "ProcessGroup",
    "QueueEmptyError",
    "RedOpType",
    "ReduceOp",
    "ReduceOptions",
    "ReduceScatterOptions",
    "ScatterOptions",
    "Store",
    "Straggler",
    "TCPStore",
    "UnixStore",
    "Work",
    "abort_process_group",
    "all_gather_object",
    "all_gather_single",
    "assert_same",
    "batch_isend_irecv",
    "breakpoint",
    "broadcast_object_list",
    "coalescing_manager",
    "default_pg_timeout",
    "destroy_process_group",
    "distributed_c10d",
    "find_stragglers",
    "gather_object",
    "get_backend",
    "get_backend_config",
    "get_debug_level",
    "get_default_backend_for_device",
    "get_default_group",
    "get_default_store",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_pg_count",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "group",
    "grow_group",
    "init_device_mesh",
    "init_process_group",
    "irecv",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_shm_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    "isend",
    "make_premul_sum",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "nn",
    "on_rank",
    "rank_not_in_group",
    "record_comm",
    "recv",
    "recv_object_list",
    "reduce_scatter_single",
    "register_rendezvous_handler",
    "rendezvous",
    "scatter_object_list",
    "send",
    "send_object_list",
    "set_debug_level",
    "set_debug_level_from_env",
    "shrink_group",
    "span",
    "split_group",
    "store_based_barrier",
    "supports_complex",
]
__all__ += operations.__all__


if not TYPE_CHECKING:  # which would take any name for one that is here

    def __getattr__(name: str) -> Any:
        """The object with an underscored name of torch's module; an error for any other name."""
        if name in distributed_c10d.__all__:
            return getattr(distributed_c10d, name)
        return refuse_left_out(__name__, name)
