"""All programs, in the order of the themes."""

from __future__ import annotations

from tests.capture.ordinary import (  # noqa: F401
    arguments,
    between,
    models,
    optimizers,
    parallel,
    sizes,
)
from tests.capture.ordinary.running import PROGRAMS

__all__ = ["PROGRAMS"]
