"""Options of optimizers, such as learning rates, as inputs of a program."""

from __future__ import annotations

from typing import Any, NamedTuple

from tilework.capture.program.number import Number


class Option(NamedTuple):
    """A float among an optimizer's options, such as a learning rate, as an input of a program.

    Attributes:
        owner: The optimizer, or a scheduler, which keeps a copy of the learning rates.
        group: The position in the optimizer's ``param_groups``; None: an attribute of a scheduler.
        key: The name of the option.
        part: The position in the option if that is a tuple or list, such as betas; else None.
        number: The number that stands for the option in the program.
    """

    owner: Any
    group: int | None
    key: str
    part: int | None
    number: Number

    def text(self) -> str:
        """The option in words, such as "lr of group 0 of SGD"."""
        part = "" if self.part is None else f"[{self.part}]"
        group = "" if self.group is None else f" of group {self.group}"
        return f"{self.key}{part}{group} of {type(self.owner).__name__}"

    def get(self) -> Any:
        """The value that the owner has now; floats of numpy as floats."""
        value = options_of(self.owner, self.group)[self.key]
        value = value if self.part is None else value[self.part]
        return float(value) if isinstance(value, float) else value


def options_of(owner: Any, group: int | None) -> dict[str, Any]:
    """The options of a group of an optimizer; without a group, the attributes of the owner."""
    options: dict[str, Any] = vars(owner) if group is None else owner.param_groups[group]
    return options
