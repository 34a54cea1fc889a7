"""A record: one program, the places that it reads and writes, and the conditions for it."""

from __future__ import annotations

import linecache
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilework.capture.program.expected import Unexpected, mark_early
from tilework.capture.program.glue import ProgramConditions, layouts_hold, write_enter, write_leave
from tilework.capture.program.graph import Graph, Value
from tilework.capture.program.inductor import Compiled
from tilework.capture.program.number import Number
from tilework.capture.program.place import StatePlace, key_of_constant, memory_layout_of
from tilework.capture.program.python_code import PythonCode, groups_of, write
from tilework.capture.program.same_program import Digests
from tilework.capture.program.sizes import (
    Size,
    at,
    comparable,
    fits,
    has_size,
    integers_in,
    size_of,
    spec_at,
)
from tilework.comm.per_call import provenance_digest
from tilework.comm.per_call.callsite import call_site
from tilework.dtensor.base import wrap_as
from tilework.dtensor.tensor import DTensor
from tilework.errors import CaptureError

_BelowAutograd: Any = torch._C._AutoDispatchBelowAutograd


#: The result of a record that no longer holds.
NOT_CURRENT = object()


class _Purpose:
    """Says in errors which collective of a captured step is running.

    Args:
        name: The step's name.
        collectives: For each group, the texts of the collectives, in order.
    """

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


class StepRecord:
    """A program of a step with the conditions under which it may run.

    It is for one layout of the arguments, or for several sizes.

    Args:
        name: The step's name.
        graph: The program.
        digests: The digests of the program's collectives.
        tree: The structure of the step's result; ``graph.result`` has the leaves.
        held: The conditions of the program besides the inputs' layouts.
    """

    def __init__(
        self, name: str, graph: Graph, digests: Digests, tree: Any, held: ProgramConditions
    ) -> None:
        self.name, self.graph, self.digests, self.tree = name, graph, digests, tree
        self.held = held
        self.options, self.way, self.constants, self.guards = held
        self.groups = groups_of(graph)
        self.code: PythonCode = write(graph, self.options, name)
        weakref.finalize(self, linecache.cache.pop, self.code.file, None)
        self._run: Callable[..., list[Any]] = self.code.run
        enters_no_grad = torch.is_grad_enabled() and not graph.has_grad_mode
        self._guard: Any = torch.no_grad if enters_no_grad else _BelowAutograd
        #: True once Inductor was asked to compile the program.
        self.was_compiled = False
        self._purpose = _Purpose(name, digests.collectives)
        self._checked_options: list[Any] = [option.number.value for option in self.options]
        self._layouts = [
            None if each.is_argument or each.may_change else memory_layout_of(each.tensor)
            for each in graph.inputs
        ]
        mark_early(graph)
        self._changed = ""
        self._index = {value.number: i for i, value in enumerate(self.code.kept)}
        self._enter = write_enter(graph, held)
        #: The inputs that are the same tensors in each call, and a check of their layouts.
        self._same: list[Tensor] = [
            each.tensor for each in graph.inputs if not (each.is_argument or each.may_change)
        ]
        self._layouts_hold: Callable[..., bool] = lambda *_: False
        self._leave = write_leave(graph, tree, self.index_of)
        #: The key of the call, and the layouts of inputs that may be other tensors; in a program of
        #: several sizes, with sizes in it.
        self.signature: Any = None
        #: For a program of several sizes: True if a third size has checked it; the two records.
        self.is_checked = False
        self.made_of: tuple[StepRecord, ...] = ()
        self._divided = {x for x in integers_in(graph) if isinstance(x, Size) and x.divisor > 1}
        #: True if layouts of inputs, besides the arguments, depend on the size.
        self.signature_has_places = False

    # -- conditions --------------------------------------------------------------------------

    def is_current(self) -> bool:
        """True if all conditions of the record still hold. Local."""
        for place, thing in self.way:
            try:
                if place.get() is not thing:
                    self._changed = f"{place.text} is another object"
                    return False
            except LookupError:
                self._changed = f"{place.text} is gone"
                return False
        for place, value in self.constants:
            try:
                now = place.get()
            except LookupError:
                now = LookupError
            if now is not value and key_of_constant(now) != key_of_constant(value):
                self._changed = f"{place.text} was {value!r} and is {now!r}"
                return False
        return self._options_hold() and self._inputs_hold()

    def what_changed(self) -> str:
        """The reason for which the record was last found not to hold, in words."""
        return self._changed

    def _options_hold(self) -> bool:
        if not self.options:
            return True
        values = [option.get() for option in self.options]
        if values == self._checked_options and all(type(each) is float for each in values):
            return True
        if not all(type(each) is float for each in values):
            self._changed = "an option of an optimizer is no longer a float"
            return False
        known = {
            id(option.number): value for option, value in zip(self.options, values, strict=True)
        }
        for function, inputs, result in self.guards:
            now = function(*[_evaluated(each, known) for each in inputs])
            if now != result:
                self._changed = "an option of an optimizer takes another branch of the step"
                return False
        self._checked_options = values
        return True

    def _inputs_hold(self) -> bool:
        inputs: list[Any] = []
        for each, layout in zip(self.graph.inputs, self._layouts, strict=True):
            path = each.path
            if each.is_argument:
                inputs.append(None)  # the key of the call has checked it
                continue
            try:
                now = path.get()
                is_same = not each.may_change or all(x.get() is now for x in each.others)
            except LookupError:
                now, is_same = None, False
            if each.is_local and path.owner._spec is not each.layout:
                raise _other_layout(self.name, path, each.layout, path.owner._spec)
            if each.may_change:
                is_same = (
                    is_same
                    and now is not None
                    and (has_size(each.layout) or memory_layout_of(now) == each.layout)
                )
            else:
                is_same = now is each.tensor and memory_layout_of(now) == layout
            if not is_same:
                self._changed = f"{path.text} is another tensor, or has another layout"
                return False
            inputs.append(now)
        self._inputs = inputs
        return True

    def release(self) -> None:
        """Drop the references to inputs of the recorded call that later calls may replace."""
        for each in self.graph.inputs:
            if each.is_argument or each.may_change:
                each.tensor = None

    def sign(self, key: Any) -> None:
        """Keep the signature of the recorded call: the key, and layouts of inputs at places."""
        layouts = [each.layout for each in self.graph.inputs if each.may_change]
        self.signature = comparable(key), tuple(layouts)

    def size_in(self, key: Any) -> int | None:
        """The size of a call with this key; None if the call does not fit this record for sizes."""
        try:
            layouts = [
                memory_layout_of(each.path.get()) for each in self.graph.inputs if each.may_change
            ]
        except (LookupError, AttributeError):
            return None
        signature = comparable(key), tuple(layouts)
        size = size_of(self.signature, signature)
        if size is None or not fits(self.signature, signature, size):
            return None
        return size if all(each.divides(size) for each in self._divided) else None

    # -- a call ------------------------------------------------------------------------------

    def run(self, leaves: Sequence[Any], size: int | None = None) -> Any:
        """Run the program for a call whose arguments have the recorded layouts.

        Args:
            leaves: The leaves of the arguments.
            size: The size, for a record of several sizes.

        Returns:
            The step's result. ``NOT_CURRENT`` if the record no longer holds: nothing was done.
        """
        inputs = self.inputs_of(leaves)
        if inputs is None:
            return NOT_CURRENT
        try:
            kept = self.compute(inputs, self._checked_options, size)
        except Unexpected as error:
            if not error.is_early or self._run is not self.code.run:
                raise
            self._changed = str(error)
            return NOT_CURRENT
        return self._leave(kept, size)

    def inputs_of(self, leaves: Sequence[Any]) -> list[Tensor] | None:
        """Check that the program may run for a call, and return its inputs; None if it may not.

        The key of the call has checked the layouts of the arguments.

        Raises:
            CaptureError: A tensor that the step refers to has another layout.
        """
        inputs = self._enter(leaves)
        if inputs is None or not self._layouts_hold(*self._same):
            if not self.is_current():
                return None
            self._layouts_hold = layouts_hold(self._same)
            inputs, self._inputs = self._inputs, []
            for i, each in enumerate(self.graph.inputs):
                if each.is_argument:
                    inputs[i] = each.path.of(leaves)
            return inputs
        return inputs if self._options_hold() else None

    def compile(self, inputs: Sequence[Tensor], size: int | None = None) -> None:
        """Compile the program by Inductor for later calls. Local; takes seconds to minutes.

        If Inductor cannot compile a program for several sizes, warn, and run it as Python.

        Args:
            inputs: Inputs of a call.
            size: The size, for a record of several.
        """
        self.was_compiled = True
        numbers = [option.number for option in self.options]
        size = size if self.code.has_size else None
        try:
            run = Compiled(self.graph, numbers, self.groups, inputs, self.code.run, size)
        except Exception as error:  # the compiler's own are of many classes
            if size is None:
                raise
            warnings.warn(
                f"Inductor cannot compile {self.name} for several sizes, and torch's operators run "
                f"one after the other: {type(error).__name__}: {error}",
                stacklevel=2,
            )
        else:
            self._run, self._guard = run, torch.no_grad

    def compute(
        self, inputs: Sequence[Tensor], options: Sequence[float], size: int | None = None
    ) -> list[Any]:
        """Run the program, and return the values that outlive the call. Sets no places."""
        digests = self._purpose.digests = self.digests.of_next_call()
        before = provenance_digest.enter(0, self._purpose, None)
        try:
            # Local tensors may be of classes with their own handling of operators.
            with torch._C.DisableTorchFunctionSubclass(), self._guard():
                return self._run(*inputs, *self._sizes(size), *options, *digests)
        finally:
            provenance_digest.leave(before)

    def _sizes(self, size: int | None) -> tuple[int, ...]:
        return (size,) if size is not None and self.code.has_size else ()

    def built(self, leaf: Any, kept: Sequence[Any], size: int | None = None) -> Any:
        """Make a leaf of the result or of a place from ``kept``, the result of :meth:`compute`."""
        if isinstance(leaf, tuple) and leaf and leaf[0] == "dtensor":
            local = kept[self.index_of(leaf[1])]
            return wrap_as(DTensor, local, spec_at(leaf[2], size), leaf[3])
        if isinstance(leaf, Value | Number):
            return kept[self.index_of(leaf)]
        return leaf if size is None else at(leaf, size)

    def index_of(self, leaf: Value | Number) -> int:
        """The position of a value or number in what :meth:`compute` returns."""
        if isinstance(leaf, Value):
            return self._index[leaf.number]
        numbers = [each for each in self.graph.result if isinstance(each, Number)]
        return len(self.code.kept) + next(i for i, each in enumerate(numbers) if each is leaf)


def _other_layout(name: str, path: StatePlace, then: Any, now: Any) -> CaptureError:
    return CaptureError(
        f"{name} was captured when {path.text} was {then}, and at {call_site()} it is {now}: a "
        f"program serves one layout of each tensor that the step refers to. Call capture() again "
        f"after a change of layout"
    )


def _evaluated(thing: Any, known: dict[int, float]) -> Any:
    if not isinstance(thing, Number):
        return thing
    if thing.function is None:
        return known[id(thing)]
    return thing.function(*[_evaluated(each, known) for each in thing.inputs])
