"""A random generator for each rank, where ranks are threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final

import torch

from tilework.comm.world import World, current_world

#: torch's functions that read or write the state of the default generator.
_STATE_NAMES: Final = ("manual_seed", "seed", "initial_seed", "get_rng_state", "set_rng_state")
_PLACES: tuple[Any, ...] = (torch, torch.random)


def give_generator(world: World) -> None:
    """Give a rank a separate generator, in the state of torch's default generator."""
    world.generator = torch.Generator()
    world.generator.set_state(torch.default_generator.get_state())


@contextmanager
def own_generators() -> Iterator[None]:
    """Make random draws of threads that are ranks use the rank's own generator."""
    _patch.enter()
    try:
        yield
    finally:
        _patch.leave()


def _draw_from_ranks() -> torch.library.Library:
    """Register CPU kernels that draw from the calling rank's generator, below all modes."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CPU"):
        if not name.startswith("aten::"):
            continue
        base, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, base), overload or "default")
        names = [argument.name for argument in op._schema.arguments]
        if "generator" in names:
            put: Any = library.impl
            put(op, _drawing(op, names.index("generator")), "BackendSelect", with_keyset=True)
    return library


#: The dispatch keys of the kernels that compute.
_COMPUTING: Final = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


def _drawing(op: Any, place: int) -> Callable[..., Any]:
    """A kernel of ``op`` that gives it the rank's generator as argument number ``place``."""

    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        own = current_world().generator
        if own is not None and keys.has(torch._C.DispatchKey.CPU):
            if place < len(args):
                args = (*args[:place], args[place] or own, *args[place + 1 :])
            else:
                kwargs["generator"] = kwargs.get("generator") or own
        return op.redispatch(keys & _COMPUTING, *args, **kwargs)

    return kernel


class _Patch:
    """Replaces torch's functions of random state from the first ``enter`` to the last ``leave``."""

    def __init__(self) -> None:
        #: Made by the first ``enter``, and kept.
        self._kernels: torch.library.Library | None = None
        self._lock = threading.Lock()
        self._users = 0
        self._originals: dict[str, Callable[..., Any]] = {}

    def enter(self) -> None:
        with self._lock:
            self._kernels = self._kernels or _draw_from_ranks()
            self._users += 1
            if self._users > 1:
                return
            self._originals = {name: getattr(torch.random, name) for name in _STATE_NAMES}
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
        return getattr(generator, method)(*args, **kwargs)

    return function


_patch = _Patch()
