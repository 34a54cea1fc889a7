"""The code of a program, shared by records that differ only in constants."""

from __future__ import annotations

import linecache
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from tilework.capture.program.graph import Graph
from tilework.capture.program.inductor import Compiled
from tilework.capture.program.place import Option
from tilework.capture.program.python_code import PythonCode, groups_of, write
from tilework.capture.program.same_program import Digests
from tilework.capture.program.skeleton import Skeleton, take_apart, with_holes
from tilework.comm import provenance_digest


class _Purpose:
    """Says in errors which collective of a captured step is running."""

    def __init__(self, name: str, collectives: Sequence[Sequence[str]]) -> None:
        self.name, self.collectives = name, collectives
        self.digests: list[int] = []

    def __str__(self) -> str:
        now = provenance_digest.digest()
        for first, texts in zip(self.digests, self.collectives, strict=False):
            if 0 <= now - first < len(texts):
                return (
                    f"the captured {self.name}: its collective {now - first}, {texts[now - first]}"
                )
        return f"the captured {self.name}"


class ProgramCode:
    """The code of a program, for all records of one skeleton; without skeleton for one record."""

    def __init__(
        self,
        name: str,
        graph: Graph,
        options: Sequence[Option],
        digests: Digests,
        skeleton: Skeleton | None = None,
    ) -> None:
        self.name, self.options, self.digests = name, options, digests
        self.groups = groups_of(graph)
        self.skeleton = skeleton or take_apart(Graph(), options)
        #: The positions of the constants in which records differ.
        self.holes: tuple[int, ...] = ()
        self.purpose = _Purpose(name, digests.collectives)
        #: The calls so far, with the call that ran before the recording, and the next to check.
        self.calls, self.last_check, self.next_check = 2, 2, 0
        self._compiled: Compiled | None = None
        #: False once Inductor could not compile the program for several sizes.
        self._compiles = True
        self._first = self.graph = graph
        self.python = self._written()
        #: The code that the traced code was made of, and the traced code.
        self._traced: tuple[PythonCode, PythonCode] | None = None

    def traced(self) -> PythonCode:
        """The program with a span for each instruction, for ranks that are traced. Cached."""
        if self._traced is None or self._traced[0] is not self.python:
            self._traced = self.python, self._written(with_spans=True)
        return self._traced[1]

    def _written(self, with_spans: bool = False) -> PythonCode:
        code = write(self.graph, self.options, self.name, len(self.holes), with_spans)
        weakref.finalize(self, linecache.cache.pop, code.file, None)
        return code

    def is_due(self) -> bool:
        """Count a call; return True if the program is to be checked in the call."""
        self.calls += 1
        return self.next_check > 0 and self.calls >= self.next_check

    def schedule(self, check: bool | int | str) -> None:
        """Set the next call in which the program is checked; see ``capture``."""
        self.last_check = self.calls
        if check is False or check == "never":
            self.next_check = 0
        elif check is True:
            self.next_check = 1 << self.calls.bit_length()
        else:
            self.next_check = self.calls + (1 if check == "always" else int(check))

    def join(self, skeleton: Skeleton) -> None:
        """Let a record with an equal skeleton run this program. Local."""
        holes = tuple(sorted({*self.holes, *self.skeleton.differing(skeleton)}))
        if holes != self.holes:
            self.holes, self._compiled = holes, None
            self.graph = with_holes(self._first, self.options, holes)
            self.python = self._written()

    def compiled(
        self, inputs: Sequence[Tensor], values: Sequence[Any], shared: Sequence[int]
    ) -> Callable[..., Any] | None:
        """The program by Inductor, for inputs like these, with ``values`` in its holes. Local;
        takes seconds to minutes.

        If Inductor cannot compile a program for several sizes, warn, and return None. ``shared``:
        the positions of inputs that share memory to which the program writes.
        """
        if not self._compiles:
            return None
        try:
            if self._compiled is None or self._compiled.shared != shared:
                numbers = [option.number for option in self.options]
                self._compiled = Compiled(self.graph, numbers, self.groups, shared)
            return self._compiled.function_for(inputs, values)
        except Exception as error:  # the compiler's own are of many classes
            if not self.holes:
                raise
            self._compiles = False
            warnings.warn(
                f"Inductor cannot compile {self.name} for several sizes, and torch's operators run "
                f"one after the other: {type(error).__name__}: {error}",
                stacklevel=2,
            )
            return None
