"""Ranks as threads that draw no random numbers need no generator of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.overrides

from tilework.testing.generators import OwnDraws


@contextmanager
def shared_draws() -> Iterator[None]:
    """Leave the mode that gives each rank's draws a generator of their own.

    The mode sees each use of a tensor, down to its shape, which takes a fifth of the time of tests
    that call operators. Ranks that are processes have no such mode.
    """
    overrides: Any = torch.overrides
    if isinstance(overrides._get_current_function_mode(), OwnDraws):
        with overrides._pop_mode_temporarily():
            yield
    else:
        yield
