"""Sharded tensors and process groups for PyTorch.

Public entry points are the packages below this one, loaded when they are first used::

    import tilework.distributed as dist
    from tilework.testing import run_ranks
    import tilework as tw

    model = tw.parallel.fully_shard(model)
"""

import importlib
from types import ModuleType

__version__ = "0.1.0"

#: They import torch, or more: each only with its first use.
_PACKAGES = frozenset({
    "capture", "checkpoint", "data", "distributed", "dtensor", "errors", "launch", "layout", "mesh",
    "parallel", "rendezvous", "rpc", "sharded", "store", "testing", "torch_backend",
})  # fmt: skip


def __getattr__(name: str) -> ModuleType:
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PACKAGES})
