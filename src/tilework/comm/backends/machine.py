"""Names that the other packages of tilework use: the machine, as backends see it."""

from tilework.comm.backends.hybrid.hosts import host_identity
from tilework.comm.backends.network_interfaces import reachable_address
from tilework.comm.backends.shm.calibration import (
    SINGLE_COPY_VARIABLE,
    cache_sizes,
    host_calibration,
    host_facts,
    read_ranges,
)
