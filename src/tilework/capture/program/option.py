"""Floats outside of a program that are inputs of it: learning rates, and numbers that vary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tilework.capture.program.number import Number
from tilework.capture.program.place import Argument, StatePlace


class Option(NamedTuple):
    """A float, such as a learning rate, as an input of a program.

    Attributes:
        place: The place of the float, or of the tuple or list that holds the float.
        part: The position in the tuple or list, such as betas; None: the float is at the place.
        number: The number that stands for the float in the program.
        text: The float in words, such as "lr of group 0 of SGD".
        is_of_optimizer: True for a float of an optimizer or a scheduler.
    """

    place: StatePlace | Argument
    part: int | None
    number: Number
    text: str
    is_of_optimizer: bool

    def get(self, leaves: Sequence[Any]) -> Any:
        """The float that is there now, given the leaves of a call's arguments."""
        place = self.place
        value = leaves[place.number] if isinstance(place, Argument) else place.get()
        return value if self.part is None else value[self.part]
