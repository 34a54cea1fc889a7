"""The cut of a backward pass in two programs: some of the gradients first, then the others."""

from __future__ import annotations

from collections.abc import Sequence

from tilework.capture.program.graph import Instruction, Value
from tilework.capture.program.merging import HeldBack, Touched


def cut_backward(
    given: Sequence[Value], instructions: Sequence[Instruction], wanted: Sequence[Value]
) -> tuple[list[Instruction], list[Instruction]]:
    """The instructions that the ``wanted`` values need, and the others, each in order. Local.

    Other programs may run between the two. So random draws, calls and checks are all in the first
    part, with what must precede them. An instruction that writes to a gradient from outside
    (``given``) keeps the whole together, since gradients may share memory.
    """
    outside = {value.memory for value in given}
    if any(not outside.isdisjoint(each.writes) for each in instructions):
        return list(instructions), []
    held, need = HeldBack(), Touched()
    for each in instructions:
        held.hold(each, Touched(each))
    for value in wanted:
        need.reads |= {value.number, value.memory or value.number}
    need.writes.add("draws")
    return held.release(need), held.release()
