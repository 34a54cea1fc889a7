"""torch.compile leaves the machinery of data parallelism alone: it compiles the modules within."""

from __future__ import annotations

from tilework.comm.compiler_disable import leave_function
from tilework.parallel.data_parallel.ddp import DistributedDataParallel
from tilework.parallel.fully_sharded.fully_shard import State

_REASON = (
    "averaging gradients and gathering parameters communicate and are not traced; compile without "
    "fullgraph=True, or compile the modules within"
)

for _function in (
    *(DistributedDataParallel._before_forward, DistributedDataParallel._after_forward),
    *(State.before_forward, State.after_forward, State.before_backward),
):
    leave_function(_function, _REASON)  # type: ignore[arg-type]
