"""torch's names for parameters with other names here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: The attribute of a function with torch's names, for tests and documentation.
ATTRIBUTE = "torch_names"


def torch_names(
    ignored: Mapping[str, Any] | None = None, **names: str
) -> Callable[[_Function], _Function]:
    """A decorator that lets calls use torch's names of parameters, besides the function's own.

    Args:
        ignored: torch's parameters that mean nothing here, with the permitted value, or a function
            that is true for permitted values.
        names: Names of parameters here, by torch's names.
    """
    without = dict(ignored or {})

    def decorate(function: _Function) -> _Function:
        order = list(function.__code__.co_varnames[: function.__code__.co_argcount])
        name = function.__name__

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for theirs in [key for key in kwargs if key in names or key in without]:
                value = kwargs.pop(theirs)
                if theirs in without:
                    _check_ignored(name, theirs, value, without[theirs])
                    continue
                ours = names[theirs]
                if ours in kwargs or ours in order[: len(args)]:
                    raise TypeError(
                        f"{name}() got both {ours!r} and torch's name for it, {theirs!r}: give one"
                    )
                kwargs[ours] = value
            return function(*args, **kwargs)

        setattr(call, ATTRIBUTE, {**dict.fromkeys(without, ""), **names})
        return cast(_Function, call)

    return decorate


def _check_ignored(function: str, name: str, value: Any, allowed: Any) -> None:
    if allowed(value) if callable(allowed) else value == allowed:
        return
    only = (
        "cannot have this value here, " if callable(allowed) else f"can only be {allowed!r} here, "
    )
    raise NotImplementedError(f"{function}(): torch's parameter {name!r} {only}got {value!r}")
