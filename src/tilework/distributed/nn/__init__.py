"""torch.distributed.nn's names."""

from tilework.distributed.nn import functional

__all__ = ["functional"]
