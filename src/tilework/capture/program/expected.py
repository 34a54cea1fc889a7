"""Values on which Python or C++ has branched: in each call they must be the same."""

from __future__ import annotations

from typing import Any

from tilework.errors import CaptureError


class Unexpected(CaptureError):
    """A value on which the recorded call has branched differs in this call."""


class Expected:
    """An instruction that raises if a value on which the recorded call has branched differs from
    the value in that call.
    """

    def __init__(self, func: Any, value: Any, site: str) -> None:
        self.func, self.value, self.site = func, value, site

    def __call__(self, *args: Any) -> None:
        value = self.func(*args)
        if value != self.value:
            raise Unexpected(
                f"the value {value} at {self.site} was {self.value} in the recorded call, which "
                f"branched on it"
            )
