"""Options of optimizers as inputs of a program: learning rates, for example, may change."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tilework.capture.program.number import Number, NumberBook
from tilework.capture.program.option import Option, options_of
from tilework.capture.program.place import StatePlace
from tilework.errors import CaptureError


class OptimizerOptions:
    """Replace floats of optimizers and schedulers by Numbers within a block.

    These are the floats of ``param_groups``, such as learning rates, and of ``get_last_lr()``.

    The step is recorded in the block, and the Numbers become inputs of the program. At the end of
    the block the floats come back. An option that the step has changed raises CaptureError.

    Args:
        optimizers: The optimizers whose floats are replaced.
        schedulers: The schedulers whose floats are replaced.
        book: The numbers of the recording, which the new Numbers join.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[LRScheduler],
        book: NumberBook,
    ) -> None:
        self.optimizers, self.schedulers, self.book = optimizers, schedulers, book
        self.all: list[Option] = []
        #: Other options, which later calls must find the same.
        self.constants: list[tuple[StatePlace, Any]] = []
        #: The lists of groups, which ``load_state_dict`` replaces.
        self.way: list[tuple[StatePlace, Any]] = []
        self._before: list[tuple[dict[str, Any], str, Any, Any]] = []

    def __enter__(self) -> OptimizerOptions:
        for optimizer in self.optimizers:
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
                    is_number = self._replaces(optimizer, number, key)
                    if not (is_number or key == "params" or isinstance(value, Tensor)):
                        place = StatePlace(group, "item", key, f"{key} of {name}")
                        self.constants.append((place, value))
        for scheduler in self.schedulers:
            self._replaces(scheduler, None, "_last_lr")
        for group, key, _, stands_for in self._before:
            group[key] = stands_for
        return self

    def _replaces(self, owner: Any, group: int | None, key: str) -> bool:
        """Make options of a value; False, and nothing is done, if it has not floats alone."""
        options = options_of(owner, group)
        value: Any = options.get(key)
        parts = value if type(value) in (tuple, list) else [value]
        if not parts or not all(isinstance(each, float) for each in parts):
            return False
        numbers = [Number(float(each), None, (), self.book) for each in parts]
        for part, number in enumerate(numbers):
            option = Option(owner, group, key, None if parts is not value else part, number)
            self.all.append(option)
        stands_for = type(value)(numbers) if parts is value else numbers[0]
        self._before.append((options, key, value, stands_for))
        return True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        changed = []
        for group, key, value, stands_for in self._before:
            if group.get(key) is not stands_for:
                changed.append(key)
            group[key] = value
        changed += [
            place.text
            for place, value in self.constants
            if place.how == "item" and place.owner.get(place.key) is not value
        ]
        if changed and error is None:
            raise CaptureError(
                f"the step changes {', '.join(sorted(set(changed)))} of an optimizer in Python, as "
                f"a scheduler's step() does: a program would not do this again, since its Python "
                f"does not run. Call scheduler.step() after the captured step; an optimizer that "
                f"counts its steps has to do so in a tensor"
            )
