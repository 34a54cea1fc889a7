"""Options of optimizers as inputs of a program: learning rates, for example, may change."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from tilework.capture.number import Number, NumberBook
from tilework.capture.places import StatePlace
from tilework.errors import CaptureError


class Option(NamedTuple):
    """A float among an optimizer's options, such as a learning rate, as an input of a program.

    Attributes:
        optimizer: The optimizer.
        group: The position in ``optimizer.param_groups``.
        key: The name of the option.
        part: The position in the option if that is a tuple or list, such as betas; else None.
        number: The number that stands for the option in the program.
    """

    optimizer: Optimizer
    group: int
    key: str
    part: int | None
    number: Number

    def text(self) -> str:
        """The option in words, such as "lr of group 0 of SGD"."""
        part = "" if self.part is None else f"[{self.part}]"
        return f"{self.key}{part} of group {self.group} of {type(self.optimizer).__name__}"

    def get(self) -> Any:
        """The value that the optimizer has now; floats of numpy as floats."""
        value = self.optimizer.param_groups[self.group][self.key]
        value = value if self.part is None else value[self.part]
        return float(value) if isinstance(value, float) else value


class OptimizerOptions:
    """Replace floats of ``param_groups``, such as learning rates, by Numbers within a block.

    The step is recorded in the block, and the Numbers become inputs of the program. At the end of
    the block the floats come back. An option that the step has changed raises CaptureError.

    Args:
        optimizers: The optimizers whose floats are replaced.
        book: The numbers of the recording, which the new Numbers join.
    """

    def __init__(self, optimizers: Sequence[Optimizer], book: NumberBook) -> None:
        self.optimizers, self.book = list(dict.fromkeys(optimizers)), book
        self.all: list[Option] = []
        #: Other options, which later calls must find the same.
        self.constants: list[tuple[StatePlace, Any]] = []
        self._before: list[tuple[dict[str, Any], str, Any, Any]] = []

    def __enter__(self) -> OptimizerOptions:
        for optimizer in self.optimizers:
            name = type(optimizer).__name__
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
                    stands_for = self._number(optimizer, number, key, value)
                    if stands_for is not None:
                        self._before.append((group, key, value, stands_for))
                    elif key != "params" and not isinstance(value, Tensor):
                        place = StatePlace(group, "item", key, f"{key} of {name}")
                        self.constants.append((place, value))
        for group, key, _, stands_for in self._before:
            group[key] = stands_for
        return self

    def _number(self, optimizer: Optimizer, group: int, key: str, value: Any) -> Any:
        if isinstance(value, float):
            return self._option(optimizer, group, key, None, value)
        is_several = type(value) in (tuple, list) and len(value) > 0
        if is_several and all(isinstance(each, float) for each in value):
            parts = enumerate(value)
            return type(value)([self._option(optimizer, group, key, i, each) for i, each in parts])
        return None

    def _option(
        self, optimizer: Optimizer, group: int, key: str, index: int | None, value: float
    ) -> Number:
        number = Number(float(value), None, (), self.book)
        self.all.append(Option(optimizer, group, key, index, number))
        return number

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
