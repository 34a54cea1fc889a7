"""Counting the steps of this process's rank."""

from __future__ import annotations

import weakref
from functools import cache

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tilework.comm.world import current_world


@cache
def count_steps() -> None:
    """Count, from now on, the steps of the optimizer that steps most often. Local.

    The rank's flight records have the number, and ``tilework run --watch`` shows it.
    """
    steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
    most = 0

    def count(optimizer: Optimizer, *_: object) -> None:
        nonlocal most
        steps[optimizer] = mine = steps.get(optimizer, 0) + 1
        if mine > most:
            most = mine
            current_world().notes.steps += 1

    register_optimizer_step_post_hook(count)
