"""Order of instructions: values and memory that they touch, and instructions held back."""

from __future__ import annotations

from collections.abc import Hashable

from tilework.capture.program.expected import Expected
from tilework.capture.program.graph import BOUNDARY, Graph, Instruction
from tilework.capture.program.group_call import wait_for

#: By kind of instruction, further reasons to stay in order: random numbers, communication.
_IN_ORDER: dict[str, tuple[str, ...]] = {
    "draw": ("draws",),
    "collective": ("groups",),
    "wait": ("groups",),
    "call": ("draws", "groups"),
}


class Touched:
    """The values and the memory that instructions read and write.

    Args:
        each: The first instruction; None: nothing yet.
        is_free: True if the instruction, a collective, may change places with other collectives.
    """

    def __init__(self, each: Instruction | None = None, is_free: bool = False) -> None:
        self.reads: set[Hashable] = set()
        self.writes: set[Hashable] = set()
        if each is None:
            return
        for value in each.inputs():
            self.reads |= {value.number, value.memory or value.number}
        self.writes |= {*each.writes, *[out.number for out in each.made]}
        if not is_free and each.function is not wait_for:
            self.writes |= set(_IN_ORDER.get(each.kind, ()))

    def add(self, other: Touched) -> None:
        self.reads |= other.reads
        self.writes |= other.writes

    def meet(self, other: Touched) -> bool:
        """True if the instructions must stay in the order in which they are."""
        return not (
            self.writes.isdisjoint(other.writes)
            and self.writes.isdisjoint(other.reads)
            and self.reads.isdisjoint(other.writes)
        )


class HeldBack:
    """Instructions that a pass holds back until something needs them, in their order."""

    def __init__(self) -> None:
        self._items: list[tuple[Instruction, Touched]] = []
        self._all = Touched()

    def hold(self, each: Instruction, touched: Touched) -> None:
        self._items.append((each, touched))
        self._all.add(touched)

    def meet(self, touched: Touched) -> bool:
        """True if an instruction that touches this must come after a held instruction."""
        return self._all.meet(touched)

    def release(self, touched: Touched | None = None) -> list[Instruction]:
        """Release the instructions that must precede an access of ``touched``; None: all."""
        needed, free, need = [], [], Touched()
        need.add(touched or self._all)
        for each, own in reversed(self._items):
            if touched is None or own.meet(need):
                needed.append(each)
                need.add(own)
            else:
                free.append((each, own))
        self._items, self._all = free[::-1], Touched()
        for _, own in free:
            self._all.add(own)
        return needed[::-1]


def is_barrier(each: Instruction) -> bool:
    """True for a check of a value: if it fails, the call is undone, so nothing may be in flight."""
    return isinstance(each.function, Expected)


def up_to_backward(graph: Graph) -> int:
    """The number of instructions before the backward pass, whose inputs may share memory."""
    found = (i for i, each in enumerate(graph.instructions) if each.function is BOUNDARY)
    return next(found, len(graph.instructions))
