"""Values on which code outside of the program has branched: the same in each call."""

from __future__ import annotations

from typing import Any

from tilework.capture.program.graph import Graph
from tilework.errors import CaptureError


class Unexpected(CaptureError):
    """A value that a library reads differs in a later call from the recorded call.

    Args:
        expected: The instruction that compares the value.
        message: The message of the error.
    """

    def __init__(self, expected: Expected, message: str) -> None:
        super().__init__(message)
        #: True if the program has not had any lasting effect yet.
        self.is_early = expected.is_early


def mark_early(graph: Graph) -> None:
    """Mark the comparisons that come before a program's first write, draw or communication.

    If such a comparison fails, the program has had no effect yet.
    """
    lasting = {id(each.value.memory) for each in graph.inputs}
    for each in graph.instructions:
        if isinstance(each.function, Expected):
            each.function.is_early = True
        elif each.kind != "operator" or any(id(memory) in lasting for memory in each.writes):
            return


class Expected:
    """An instruction that raises if a value on which a library has branched is another value.

    Args:
        func: The operator that reads the value.
        value: The value in the recorded call.
        site: The line of the user's program.
    """

    def __init__(self, func: Any, value: Any, site: str) -> None:
        self.func, self.value, self.site = func, value, site
        self.is_early = False

    def __call__(self, *args: Any) -> None:
        value = self.func(*args)
        if value != self.value:
            raise Unexpected(
                self,
                f"a captured step comes to a value of {value} at {self.site}, where the recorded "
                f"call found {self.value}: there torch or tilework check a value, or choose what "
                f"to do. An index may be out of range, or a gradient not finite: run the step "
                f"without capture() to see",
            )
