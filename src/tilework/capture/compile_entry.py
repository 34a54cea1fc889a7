"""torch.compile of functions and modules with DTensors, without Dynamo.

Dynamo would compile the code between operators on DTensors, in many small graphs that cost more
than they save. Instead such functions are recorded as
:func:`tilework.dtensor.capture` records steps, with a backward pass of their own. A function that
cannot be recorded runs as it is, with one warning.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn

from tilework.capture.modules import compiled_function
from tilework.dtensor import DTensor
from tilework.dtensor.internal import NOT_TRACED
from tilework.errors import CaptureError


def compile_model(
    original: Callable[..., Any], model: Any = None, *, fullgraph: bool = False, **settings: Any
) -> Any:
    """``torch.compile``, but functions with DTensors are recorded instead of traced. Local."""
    if model is None:
        return lambda model: compile_model(original, model, fullgraph=fullgraph, **settings)
    compiled = original(model, fullgraph=fullgraph, **settings)
    if compiled is model:  # torch.compile is disabled
        return compiled
    backend = settings.get("backend") or "inductor"
    backend = backend if backend == "inductor" else "python"
    if isinstance(compiled, nn.Module):
        compiled.forward = _chosen(model, compiled.forward, backend, fullgraph)
        return compiled
    return functools.wraps(compiled)(_chosen(model, compiled, backend, fullgraph))


def _chosen(
    model: Any, compiled: Callable[..., Any], backend: str, fullgraph: bool
) -> Callable[..., Any]:
    """A function that calls Dynamo's form, or a recorded form if it computes with DTensors."""
    module = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
    is_known, has_some = False, False
    recorded: Callable[..., Any] | None = None

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_known, has_some, recorded
        if not is_known:
            is_known = True
            has_some = isinstance(module, nn.Module) and _computes_with_dtensors(module)
        given = (*args, *kwargs.values())
        if not (has_some or any(isinstance(each, DTensor) for each in given)):
            try:
                return compiled(*args, **kwargs)
            except RuntimeError as error:
                if not (fullgraph and NOT_TRACED in str(error)):
                    raise
                has_some = True  # Dynamo met a DTensor; with no graph breaks nothing has run yet
        if recorded is None:
            recorded = compiled_function(model, backend)
        try:
            return recorded(*args, **kwargs)
        except CaptureError as error:
            if fullgraph:
                raise
            recorded = model
            warnings.warn(
                f"torch.compile runs {getattr(model, '__name__', type(model).__name__)} as it is, "
                f"uncompiled: {error}",
                stacklevel=2,
            )
            return model(*args, **kwargs)

    return call


def _computes_with_dtensors(module: nn.Module) -> bool:
    """True if a parameter of a module, as attribute access returns it, is a DTensor."""
    return any(
        isinstance(getattr(each, name), DTensor)
        for each in module.modules()
        for name in each._parameters
    )
