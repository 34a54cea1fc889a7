"""Importing it hides what is loaded so far from garbage collection, for processes forked later."""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
