"""Places: where a program finds tensors and numbers, and where it puts tensors."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from torch import Tensor

from tilework.dtensor.tensor import DTensor


class StatePlace(NamedTuple):
    """The place of a part of an object, where a step may find a tensor or a number.

    Attributes:
        owner: The object that has the part.
        how: The kind of part: "item", "attribute", "cell" (of a closure), "grad" (the local
            gradient of a tensor), "address" (of a tensor's memory), "length", "presence" (whether a
            dict has the key), or "content" (of a set, or the checksum of a numpy array).
        key: The key of the item, or the name of the attribute.
        text: The place in words, as a program would write it.
    """

    owner: Any
    how: str
    key: Any
    text: str

    def get(self) -> Any:
        """The object at this place now.

        Raises:
            LookupError: Nothing is there.
        """
        try:
            if self.how == "item":
                if isinstance(self.owner, defaultdict) and self.key not in self.owner:
                    raise LookupError(self.text)  # a look must not make the item
                return self.owner[self.key]
            if self.how == "cell":
                return self.owner.cell_contents
            if self.how == "grad":
                return plain(self.owner).grad
            if self.how == "length":
                return len(self.owner)
            if self.how == "presence":
                return self.key in self.owner
            if self.how == "address":
                return plain(self.owner).data_ptr()
            if self.how == "content":
                is_set = isinstance(self.owner, set)
                return frozenset(self.owner) if is_set else zlib.crc32(self.owner.tobytes())
            return getattr(self.owner, self.key)
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
                self.owner._grad = None
        else:
            setattr(self.owner, self.key, value)

    def put_back(self, then: Any) -> None:
        """Undo a change: let this place have what it had, and a container the items it had."""
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
        elif self.how != "content" and not isinstance(self.owner, tuple | type):
            self.set(then)


class Argument:
    """The place of a tensor among the arguments of a call: a leaf, or a leaf's local tensor.

    Args:
        number: The position among the leaves of the arguments.
        is_dtensor: True if the leaf is a DTensor.
    """

    __slots__ = ("is_dtensor", "number")

    def __init__(self, number: int, is_dtensor: bool) -> None:
        self.number, self.is_dtensor = number, is_dtensor

    def of(self, leaves: Sequence[Any]) -> Tensor:
        """The tensor at this place, given the leaves of a call's arguments."""
        leaf: Any = leaves[self.number]
        return leaf._local_tensor if self.is_dtensor else leaf  # type: ignore[no-any-return]


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
    return tensor._local_tensor if tensor.__class__ is DTensor else tensor
