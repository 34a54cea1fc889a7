"""Floats that are inputs of a program: options of optimizers, and numbers that vary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import BuiltinFunctionType, TracebackType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from tilework.capture.program.graph import Expected, Graph, Value
from tilework.capture.program.number import Number, NumberBook, is_float, with_numbers
from tilework.capture.program.place import Argument, Option, StatePlace
from tilework.capture.recording.places import StatePlaces
from tilework.errors import CaptureError


class Inputs:
    """Replace floats to which a step refers by Numbers within a block.

    These are the floats of ``param_groups``, such as learning rates, those of ``get_last_lr()``,
    and others that were seen to vary. The step is recorded in the block, and the Numbers become
    inputs of the program. At the end of the block the floats come back. A float that the step has
    changed raises CaptureError. Functions of ``math`` that the step imports by name are replaced,
    too: those in C would compute with the NaN of a Number.

    Args:
        arguments: By position among the leaves, the Numbers that stand for arguments.
        varying: The places of other floats that vary; None: no float but arguments is replaced.
        book: The numbers of the recording, which the new Numbers join.
    """

    def __init__(
        self,
        places: StatePlaces,
        arguments: Mapping[int, Number],
        varying: Sequence[StatePlace] | None,
        book: NumberBook,
    ) -> None:
        self.book = book
        self.optimizers = places.instances(Optimizer)
        self.schedulers = places.instances(LRScheduler)
        self._varying, self._things = varying, places.things
        self.all = [
            Option(Argument(i, False), None, number, f"argument {i}", False)
            for i, number in arguments.items()
        ]
        #: Other options, which later calls must find the same.
        self.constants: list[tuple[StatePlace, Any]] = []
        #: The lists of groups, which ``load_state_dict`` replaces.
        self.way: list[tuple[StatePlace, Any]] = []
        self._before: list[tuple[StatePlace, Any, Any]] = []

    def __enter__(self) -> Inputs:
        for optimizer in self.optimizers:
            self._take_optimizer(optimizer)
        for scheduler in self.schedulers:
            place = StatePlace(scheduler, "attribute", "_last_lr", "_last_lr")
            self._replaces(place, f"_last_lr of {type(scheduler).__name__}", True)
        for place in self._varying or ():
            self._replaces(place, place.text, False)
        for place, thing in self._things:
            if isinstance(thing, BuiltinFunctionType) and thing.__module__ == "math":
                self._before.append((place, thing, with_numbers(thing)))
        for place, _, stands_for in self._before:
            place.set(stands_for)
        return self

    def _take_optimizer(self, optimizer: Optimizer) -> None:
        name = type(optimizer).__name__
        groups = StatePlace(optimizer, "attribute", "param_groups", f"param_groups of {name}")
        self.way.append((groups, optimizer.param_groups))
        for thing in (optimizer.param_groups, *(x["params"] for x in optimizer.param_groups)):
            text = f"the number of groups or parameters of {name}"
            self.constants.append((StatePlace(thing, "length", None, text), len(thing)))
        for state in optimizer.state.values():
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, bool | int | float | str):
                    text = f"{key} of a parameter's state in {name}"
                    self.constants.append((StatePlace(state, "item", key, text), value))
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                place = StatePlace(group, "item", key, f"{key} of {name}")
                is_number = self._replaces(place, f"{key} of group {number} of {name}", True)
                if not (is_number or key == "params" or isinstance(value, Tensor)):
                    self.constants.append((place, value))

    def _replaces(self, place: StatePlace, text: str, is_of_optimizer: bool) -> bool:
        """Make options of a value that consists of floats; False for any other value."""
        if self._varying is None:
            return False
        try:
            value: Any = place.get()
        except LookupError:
            return False
        parts = value if type(value) in (tuple, list) else [value]
        if not parts or not all(map(is_float, parts)):
            return False
        numbers = [Number(each, None, (), self.book) for each in parts]
        for part, number in enumerate(numbers):
            if parts is value:
                name = f"{text}[{part}]"
                self.all.append(Option(place, part, number, name, is_of_optimizer))
            else:
                self.all.append(Option(place, None, number, text, is_of_optimizer))
        stands_for = type(value)(numbers) if parts is value else numbers[0]
        self._before.append((place, value, stands_for))
        return True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        changed = list(self._changed())
        for place, value, _ in self._before:
            place.set(value)
        if changed and error is None:
            raise CaptureError(
                f"the step changes {', '.join(sorted(set(changed)))} in Python, as a scheduler's "
                f"step() does: a program would not do this again, since its Python does not run. "
                f"Call scheduler.step() after the captured step; an optimizer that counts its "
                f"steps has to do so in a tensor"
            )

    def lead_beyond(self, graph: Graph) -> bool:
        """True if the step may pass Numbers to C++ besides the options of optimizers."""
        if not all(each.is_of_optimizer for each in self.all):
            return True
        known = {id(each.number) for each in self.all if each.is_of_optimizer}

        def leads(leaf: Any) -> bool:
            if not isinstance(leaf, Number):
                return False
            if leaf.function is None:
                return id(leaf) not in known
            return any(isinstance(each, Value) or leads(each) for each in leaf.inputs)

        return any(
            leads(leaf)
            for each in graph.instructions
            if not isinstance(each.target, Expected)
            for leaf in tree_leaves((each.args, each.kwargs))
        )

    def _changed(self) -> Iterator[str]:
        for place, _, stands_for in self._before:
            now = place.get()
            parts = now if isinstance(now, tuple | list) else [now]
            is_option = place.how == "item"
            # An optimizer within another one is given the options of the other.
            if now is not stands_for and not (
                is_option and all(isinstance(x, Number) and x.function is None for x in parts)
            ):
                yield place.text
        for place, value in self.constants:
            if place.how == "item" and place.owner.get(place.key) != value:
                yield place.text
