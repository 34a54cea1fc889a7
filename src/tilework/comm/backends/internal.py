"""Names that the other packages of tilework use."""

from tilework.comm.backend import (
    Backend,
    BackendConfig,
    DistributedBackendOptions,
    core_error,
    get_default_backend_for_device,
    is_backend_available,
    is_gloo_available,
    is_mpi_available,
    is_nccl_available,
    is_shm_available,
    is_ucc_available,
    is_xccl_available,
    torch_has,
)
from tilework.comm.backends import load_backend
from tilework.comm.backends.per_device import backend_for
from tilework.comm.backends.rounding import ROW, HybridOptions, Rounding, dequantise, quantise
