"""A test script of accelerate's own, in a group that is made before it.

Not run are those that fail on Gloo, too: test_ddp_comm_hook needs GPUs, and so does
test_distributed_data_loop, for a ``join`` that accelerate ignores on CPUs. Those in external_deps
need GPUs, or download data.
"""

from __future__ import annotations

import os
import runpy
import sys

import torch.distributed as dist

import tilework.torch_backend  # noqa: F401  # registers the backend
from tests.clients.program import report

if __name__ == "__main__":
    backend, name = sys.argv[1:]
    os.environ["ACCELERATE_USE_CPU"] = "true"
    dist.init_process_group(backend)
    assert dist.get_backend() == backend
    sys.argv = [name]
    runpy.run_module(f"accelerate.test_utils.scripts.{name}", run_name="__main__")
    report(f"{name} passed")
