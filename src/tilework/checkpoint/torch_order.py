"""Calls in torch's form: torch's names of parameters, and the state before the path."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

from tilework.checkpoint.storage import Storage
from tilework.comm.per_call.internal import ATTRIBUTE, torch_names
from tilework.comm.world import is_initialized

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _without_ranks(no_dist: bool) -> bool:
    """True if torch's ``no_dist`` may be given: it is False, or there is no process group."""
    return not no_dist or not is_initialized()


saving_names = torch_names(
    {
        "storage_writer": None,
        "planner": None,
        "no_dist": _without_ranks,
        "use_collectives": True,
        "async_checkpointer_type": lambda kind: getattr(kind, "value", kind) == "thread",
        "async_stager": None,
    },
    state_dict="state",
    checkpoint_id="path",
    process_group="group",
)
_loading_names = torch_names(
    {"storage_reader": None, "planner": None, "no_dist": _without_ranks},
    state_dict="into",
    checkpoint_id="path",
    process_group="group",
)


def loading_names(function: _Function) -> _Function:
    """Decorate ``load(path, into)`` to accept torch's order and names: ``load(state, path)``."""
    named = _loading_names(function)

    @functools.wraps(function)
    def load(*args: Any, **kwargs: Any) -> Any:
        if args and not isinstance(args[0], str | os.PathLike | Storage) and "into" not in kwargs:
            state, *rest = args
            if rest and isinstance(rest[0], str | os.PathLike | Storage):
                args = (rest[0], state, *rest[1:])
            elif not rest and not {"path", "checkpoint_id"}.isdisjoint(kwargs):
                args, kwargs = (), {**kwargs, "into": state}
            else:
                raise TypeError(
                    f"load(path, into=state): the first argument is the path of a checkpoint, and "
                    f"got {type(state).__name__}. In torch's order it is load(state, path), or "
                    f"load(state, checkpoint_id=path)"
                )
        return named(*args, **kwargs)

    setattr(load, ATTRIBUTE, getattr(named, ATTRIBUTE))
    return cast(_Function, load)
