"""Public operations whose usual calls the core takes, without a frame of Python's in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

try:
    from tilework import _core
except ImportError:  # installed without the core
    _core = None  # type: ignore[assignment]

_Function = TypeVar("_Function", bound=Callable[..., Any])


def core_first(inputs: str = "", outputs: str = "") -> Callable[[_Function], _Function]:
    """A decorator of a public operation that the fast path has, by the function's name.

    A call has two ways. The core takes calls on groups with a fast path whose tensors need no
    preparation. The function gets all other calls, and those that the core refuses. Where the
    core takes a call, the function must do the same with it: while a profiler watches, the function
    gets such calls, too. docs/algorithms/entrances.md shows all entrances of the core.

    Args:
        inputs: The parameter for what the operation reads on this rank; "" for none.
        outputs: Likewise for what it writes.

    Example:
        >>> import pickle, types
        >>> from tilework.comm.operations.collectives import barrier
        >>> isinstance(barrier, types.FunctionType), pickle.loads(pickle.dumps(barrier)) is barrier
        (True, True)
    """
    if _core is None:
        return lambda function: function
    return lambda function: _core.fast_function(function, inputs, outputs)
