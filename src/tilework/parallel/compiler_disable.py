"""torch.compile leaves the machinery of data parallelism alone: it compiles the modules within."""

from __future__ import annotations

from tilework.comm.operations.internal import leave_function
from tilework.parallel.data_parallel.ddp import DistributedDataParallel
from tilework.parallel.fully_sharded.module import FSDPModule
from tilework.parallel.fully_sharded.unit import Unit

_REASON = (
    "averaging gradients and gathering parameters communicate and are not traced; compile without "
    "fullgraph=True, or compile the modules within"
)

for _function in (
    *(DistributedDataParallel._before_forward, DistributedDataParallel._after_forward),
    *(Unit._enter, Unit._clean, Unit._end_run, Unit._watch, Unit._check_unwritten),
):
    leave_function(_function, _REASON)  # type: ignore[arg-type]
for _caller in (FSDPModule.__call__, Unit.run):
    leave_function(_caller, _REASON, with_calls=False)  # type: ignore[arg-type]
