"""A random generator for each rank, where ranks are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from tilework.comm.world import World, current_world

#: torch's functions that read or write the state of its default generator.
_NAMES = ("manual_seed", "seed", "initial_seed", "get_rng_state", "set_rng_state")
_PLACES: tuple[Any, ...] = (torch, torch.random)


def give_generator(world: World) -> None:
    """Let a rank have a generator of its own, in the state of torch's default one."""
    world.generator = torch.Generator()
    world.generator.set_state(torch.default_generator.get_state())


@contextmanager
def own_generators() -> Iterator[None]:
    """Let ``torch.manual_seed`` and the like act on the calling rank's own generator.

    That is where DTensors' random numbers come from. ``manual_seed`` seeds the shared one besides,
    which plain tensors are filled from; threads that are no ranks have but that.
    """
    _patch.enter()
    try:
        yield
    finally:
        _patch.leave()


class _Patch:
    """Replaces torch's functions for as long as somebody needs it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._originals: dict[str, Callable[..., Any]] = {}

    def enter(self) -> None:
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            self._originals = {name: getattr(torch.random, name) for name in _NAMES}
            for name, original in self._originals.items():
                _put(name, _of_rank(name, original))

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                for name, original in self._originals.items():
                    _put(name, original)


def _put(name: str, function: Callable[..., Any]) -> None:
    for place in _PLACES:
        setattr(place, name, function)


def _of_rank(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    method = name.replace("_rng", "")  # get_state, set_state

    @wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        generator = current_world().generator
        if generator is None:
            return original(*args, **kwargs)
        if name == "manual_seed":
            original(*args, **kwargs)
        return getattr(generator, method)(*args, **kwargs)

    return function


_patch = _Patch()
