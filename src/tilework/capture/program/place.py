"""Places outside of a program, of tensors and floats that it reads; floats that are inputs."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from torch import Tensor

from tilework.capture.program.number import Number
from tilework.dtensor import DTensor
from tilework.dtensor.internal import forget_grad, local_tensor_of

_READ_ONLY = ("content", "layout", "keys", "address")


class StatePlace(NamedTuple):
    """The place of a part of an object, where a step may find a tensor or a number.

    Attributes:
        owner: The object that has the part.
        how: The kind of part: "item", "attribute", "cell" (of a closure), "grad" (the local
            gradient of a tensor), "address" (of a tensor's memory), "layout" (of the tensor at the
            place ``owner``), "length", "keys" (of a dict, in order), "presence" (whether a dict has
            the key), or "content" (of a set, or the checksum of a numpy array).
        key: The key of the item, or the name of the attribute.
        text: The place in words, as a program would write it.
    """

    owner: Any
    how: str
    key: Any
    text: str

    def get(self) -> Any:
        """The object at this place now. Raises LookupError if nothing is there."""
        try:
            return _READS[self.how](self)
        except (AttributeError, ValueError, TypeError) as error:
            raise LookupError(str(error)) from None

    def set(self, value: Any) -> None:
        """Put a value into this place."""
        if self.how == "item":
            self.owner[self.key] = value
        elif self.how == "cell":
            self.owner.cell_contents = value
        elif self.how == "grad":
            plain(self.owner).grad = value
            if self.owner.__class__ is DTensor:
                forget_grad(self.owner)
        else:
            setattr(self.owner, self.key, value)

    def put_back(self, then: Any) -> None:
        """Undo a change: restore the object at this place, and the items of a container."""
        with suppress(LookupError):
            if self.how != "grad" and self.get() is then:
                return
        if self.how == "length":
            while len(self.owner) > then:
                self.owner.popitem() if isinstance(self.owner, dict) else self.owner.pop()
        elif self.how == "presence":
            self.owner.pop(self.key, None)
        elif self.how == "content" and isinstance(self.owner, set):
            self.owner.clear()
            self.owner.update(then)
        elif self.how not in _READ_ONLY and not isinstance(self.owner, tuple | type):
            with suppress(LookupError, AttributeError):  # a shorter list, or a frozen object
                self.set(then)


def _item(place: StatePlace) -> Any:
    if isinstance(place.owner, defaultdict) and place.key not in place.owner:
        raise LookupError(place.text)  # a look must not make the item
    return place.owner[place.key]


def _content(place: StatePlace) -> Any:
    owner = place.owner
    return frozenset(owner) if isinstance(owner, set) else zlib.crc32(owner.tobytes())


#: By kind of place, a function that reads it.
_READS: dict[str, Callable[[StatePlace], Any]] = {
    "item": _item,
    "attribute": lambda place: getattr(place.owner, place.key),
    "cell": lambda place: place.owner.cell_contents,
    "grad": lambda place: plain(place.owner).grad,
    "length": lambda place: len(place.owner),
    "keys": lambda place: tuple(place.owner),
    "presence": lambda place: place.key in place.owner,
    "layout": lambda place: memory_layout_of(plain(place.owner.get())),
    "address": lambda place: plain(place.owner).data_ptr(),
    "content": _content,
}


class Argument:
    """The place of a tensor in arguments: the leaf of this number, or the local tensor there."""

    __slots__ = ("is_dtensor", "number")

    def __init__(self, number: int, is_dtensor: bool) -> None:
        self.number, self.is_dtensor = number, is_dtensor

    def of(self, leaves: Sequence[Any]) -> Tensor:
        """The tensor at this place, given the leaves of a call's arguments."""
        leaf: Any = leaves[self.number]
        return local_tensor_of(leaf) if self.is_dtensor else leaf


def is_dtensor(thing: Any) -> bool:
    """True if ``thing`` is a DTensor."""
    return thing.__class__ is DTensor


def memory_layout_of(tensor: Any) -> tuple[Any, ...]:
    """The shape, dtype, strides, device and ``requires_grad`` of a tensor."""
    shape = tuple(tensor.shape)
    return shape, tensor.dtype, tensor.stride(), tensor.device, tensor.requires_grad


def key_of_constant(value: Any) -> tuple[Any, ...]:
    """A key that differs for different constants, also for 2 and 2.0, and for 0.0 and -0.0."""
    return type(value), repr(value) if isinstance(value, float) else value


def plain(tensor: Any) -> Any:
    """The local tensor of a DTensor; other things unchanged."""
    return local_tensor_of(tensor) if tensor.__class__ is DTensor else tensor


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
