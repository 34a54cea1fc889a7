"""Counting the steps of this process's rank."""

from __future__ import annotations

import weakref
from functools import cache

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tilework.comm.world import World, current_world


@cache
def count_steps() -> None:
    """Count, from now on, the steps of the optimizer that steps most often. Local.

    The rank's flight records have the number, and ``tilework run --watch`` shows it. In a trace
    they separate steps. The hook stays: other ranks of the process may go through torch's now.
    """
    steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
    most: weakref.WeakKeyDictionary[World, int] = weakref.WeakKeyDictionary()

    def count(optimizer: Optimizer, *_: object) -> None:
        world = current_world()
        steps[optimizer] = mine = steps.get(optimizer, 0) + 1
        if mine > most.get(world, 0):
            most[world] = mine
            world.notes.steps += 1
            note = getattr(world.sink, "note_step", None)  # a trace's sink
            if note is not None:
                note()

    register_optimizer_step_post_hook(count)
