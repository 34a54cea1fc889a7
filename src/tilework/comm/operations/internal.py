"""Names that the other packages of tilework use."""

from tilework.comm.agreement import Facts, agree, agree_equal, are_alike, check_equal
from tilework.comm.flight.spans import span
from tilework.comm.operations.coalescing import CoalescedWork, coalescing_manager, uncoalesced
from tilework.comm.operations.collectives import *  # noqa: F403
from tilework.comm.operations.collectives import __all__ as __all__
from tilework.comm.operations.collectives import all_reduce_sparse, run
from tilework.comm.operations.compiler_disable import leave_function
from tilework.comm.operations.find_stragglers import find_stragglers
from tilework.comm.operations.objects import (
    all_gather_object,
    broadcast_object_list,
    device_of,
    gather_object,
    load_plain,
    recv_object_list,
    scatter_object_list,
    send_object_list,
)
from tilework.comm.operations.on_rank import assert_same, breakpoint, on_rank
from tilework.comm.operations.p2p import P2POp, batch_isend_irecv, irecv, isend, recv, send
from tilework.comm.reduce_op import identity_element
from tilework.comm.transfer.large_buffers import LARGE_BYTES, empty_tensor
from tilework.comm.transfer.round_shares import blocks
from tilework.comm.transfer.run import run_plan, single_run
