"""A program as data: values, and instructions in the order in which the step ran them.

The program is not functional. An instruction may write to memory, and values may share memory, as
in the step itself: run in order, instructions do what the step did.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tilework.capture.program.number import Number
from tilework.capture.program.place import Argument, is_dtensor
from tilework.errors import CaptureError

#: Classes of other containers: torch looks into some of their subclasses.
_OTHERS = (tuple, list, dict, deque)


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with ``function(leaf)`` in the place of each leaf (as torch defines leaves)."""
    kind = tree.__class__
    if kind is tuple:
        return tuple([mapped(function, each) for each in tree])
    if kind is list:
        return [mapped(function, each) for each in tree]
    if kind is dict:
        return {key: mapped(function, each) for key, each in tree.items()}
    return tree_map(function, tree) if isinstance(tree, _OTHERS) else function(tree)


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of a tree (as torch defines them), in order."""
    kind = tree.__class__
    if kind is tuple or kind is list:
        return [leaf for each in tree for leaf in leaves_of(each)]
    if kind is dict:
        return [leaf for each in tree.values() for leaf in leaves_of(each)]
    return tree_leaves(tree) if isinstance(tree, _OTHERS) else [tree]


#: Makes a number from an element; recording replaces the method itself.
ITEM: Callable[[Tensor], Any] = Tensor.item


#: The name of an instruction that makes a tensor from known memory.
ALIAS = "alias.as_strided"


def BOUNDARY() -> None:
    """Mark the border between the forward and the backward pass of a record."""


@dataclass(eq=False, slots=True)
class ProgramMemory:
    """Memory that several values of a program may be tensors in."""

    #: The size of the storage when the step was recorded, in bytes.
    nbytes: int


@dataclass(frozen=True, slots=True)
class Hole:
    """A constant in which records differ: parameter ``k<number>``; the example is the first's."""

    number: int
    example: Any


@dataclass(eq=False, slots=True)
class Value:
    """A tensor of the program, or another object that an instruction made.

    Attributes:
        memory: The memory that the tensor's elements lie in; None: not a tensor.
        text: The shape and dtype, for people.
        shape: The shape when the step was recorded.
        dtype: The dtype; None: not a tensor.
        device: The device; None: not a tensor.
    """

    number: int
    memory: ProgramMemory | None = None
    text: str = ""
    shape: tuple[Any, ...] = ()
    dtype: torch.dtype | None = None
    device: torch.device | None = None


@dataclass(eq=False, slots=True)
class Instruction:
    """A call of a function in a program.

    Attributes:
        function: An operator of torch, or another function that has the same effect at each call.
        args: The arguments, a tree with values and numbers in it.
        outputs: The result's leaves in order; None: a leaf that nothing needs.
        form: The structure of the result: "leaf", "flat" (a sequence of leaves) or "deep".
        writes: Memory that the instruction writes to.
        kind: "operator", "collective", "wait", "draw" (which changes a generator) or "call".
        name: The function's name, for people.
        nbytes: The bytes of this rank's input of a collective.
        number: The number in the order of the step, from 1; 0: a pass has made the instruction.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    outputs: list[Value | None] = field(default_factory=lambda: [None])
    form: str = "leaf"
    writes: tuple[ProgramMemory, ...] = ()
    kind: str = "operator"
    site: str = ""
    name: str = ""
    nbytes: int = 0
    number: int = 0

    def __post_init__(self) -> None:
        self.name = self.name or str(self.function)

    @property
    def target(self) -> Any:
        """The function, also where records differ in it."""
        return self.function.example if isinstance(self.function, Hole) else self.function

    @property
    def made(self) -> list[Value]:
        """The values that the instruction makes."""
        return [out for out in self.outputs if out is not None]

    def inputs(self) -> Iterator[Value]:
        """The values among the arguments, and those that numbers among them are computed from."""
        return values_in((self.args, self.kwargs))


def values_in(tree: Any) -> Iterator[Value]:
    """The values in a tree, and those that numbers in the tree are computed from."""
    for leaf in leaves_of(tree):
        if isinstance(leaf, Value):
            yield leaf
        elif isinstance(leaf, Number):
            yield from values_in(leaf.inputs)


@dataclass(eq=False, slots=True)
class Input:
    """A tensor from outside of a program, which is read in each call at the same place.

    Attributes:
        value: The value in the program.
        path: The place: see :mod:`~tilework.capture.program.place`.
        tensor: The tensor that was there in the recorded call. Except for arguments, and if
            ``may_change``, the same tensor must be there in each call.
        layout: The layout that a tensor at the place must have; for a DTensor's local tensor, the
            layout of the DTensor. None for arguments, whose layouts the key of a call has.
        others: Other places that had the same tensor. The step may have read the tensor there, so
            each call must find the same tensor at all of the places.
    """

    value: Value
    path: Any
    tensor: Any
    layout: Any = None
    others: Sequence[Any] = ()

    @property
    def is_argument(self) -> bool:
        """True if the tensor is an argument of the step, or the local tensor of an argument."""
        return self.path.__class__ is Argument

    @property
    def may_change(self) -> bool:
        """True if a later call may find another tensor of the same layout at the place."""
        return self.layout is not None and not self.is_local

    @property
    def moves(self) -> bool:
        """True if calls may take other tensors."""
        return self.is_argument or self.may_change

    @property
    def is_local(self) -> bool:
        """True for the local tensor of a DTensor that the step refers to."""
        return not self.is_argument and self.path.how == "attribute" and is_dtensor(self.path.owner)


@dataclass(eq=False, slots=True)
class Graph:
    """A program: what a recorded step did, as instructions on values.

    Attributes:
        inputs: Tensors from outside, in the order in which the step came to them.
        instructions: The instructions, in the order of the step.
        result: The leaves of the step's result, with values in the place of tensors.
        places: The places where the step has put other tensors, such as gradients:
            (place, stand-in for the tensor). None stands for no gradient.
        has_grad_mode: True if an operator ran with gradients enabled. oneDNN's recurrent layers
            have other last bits then.
        keeps_order: True if all instructions are the step's, in the step's order. If not, the
            program relies on which inputs share memory.
        votes_last: True if a rank's program branches on a value after the last collective: then
            ranks vote at the end of a run on whether all values were the recorded ones.
    """

    inputs: list[Input] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    result: Any = None
    places: list[tuple[Any, Any]] = field(default_factory=list)
    has_grad_mode: bool = False
    keeps_order: bool = True
    votes_last: bool = False

    def __post_init__(self) -> None:
        numbers = [each.number for each in self.instructions]
        self.keeps_order &= 0 not in numbers and numbers == sorted(numbers)

    def kept(self) -> list[Value]:
        """The values that outlive a call: those of the result, and those put into places."""
        return list(values_in((self.result, [tree for _, tree in self.places])))

    def new_values(self) -> Iterator[int]:
        """Numbers for values that a pass makes."""
        values = [each.value for each in self.inputs]
        values += [out for each in self.instructions for out in each.made]
        return count(max([each.number for each in values], default=0) + 1)

    def last_uses(self) -> list[list[Value]]:
        """For each instruction, the values that nothing needs after it."""
        kept = {value.number for value in self.kept()}
        seen: set[int] = set(kept)
        result: list[list[Value]] = []
        for each in reversed(self.instructions):
            last = []
            for value in (*each.inputs(), *each.made):
                if value.number not in seen:
                    seen.add(value.number)
                    last.append(value)
            result.append(last)
        return result[::-1]


class Unexpected(CaptureError):
    """A value on which the recorded call has branched differs in this call."""


class Expected:
    """An instruction that raises if a value that decided a branch is not that of the record."""

    def __init__(self, func: Any, value: Any, site: str) -> None:
        self.func, self.value, self.site = func, value, site

    def __call__(self, *args: Any) -> None:
        value = self.func(*args)
        if value != self.value:
            raise Unexpected(
                f"the value {value} at {self.site} was {self.value} in the recorded call, which "
                f"branched on it"
            )
