"""Rows of a dataset for each rank: a sampler and a loader, divided by group or mesh, resumable."""

from tilework.data.loader import DataLoader
from tilework.data.sampler import DistributedSampler, Uneven

__all__ = ["DataLoader", "DistributedSampler", "Uneven"]
