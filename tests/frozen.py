"""Importing it prepares a process that others are forked from.

What is loaded so far is hidden from garbage collection, which would copy it in each fork, and
torch's operators run in the thread that calls them, as in the tests' own process.
"""

from __future__ import annotations

import gc

import torch

torch.set_num_threads(1)
gc.collect()
gc.freeze()
