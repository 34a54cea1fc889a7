"""Sharded tensors and process groups for PyTorch.

Public entry points are the packages below this one::

    import tilework.distributed as dist
    from tilework.testing import run_ranks
    from tilework.launch import spawn
"""

__version__ = "0.1.0"
