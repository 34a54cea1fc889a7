"""Importing it prepares a process that others are forked from.

Garbage collection skips all loaded objects then, which it would copy in each fork, and torch's
operators run in the thread that calls them, as in the process of the tests.
"""

from __future__ import annotations

import gc

import torch

torch.set_num_threads(1)
gc.collect()
gc.freeze()
