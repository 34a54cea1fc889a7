"""Passes: functions that make a program from a program, between the recording and the back end.

Each pass is a function from :class:`~tilework.capture.program.graph.Graph` to ``Graph``, and leaves
the given graph as it is. The program that it returns gives the same bits, and has the same
collectives in the same order on all ranks of a group. A pass may be collective over the groups of
the program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from tilework.capture.program.graph import Graph, Instruction, ProgramMemory, Value
from tilework.capture.program.group_call import GroupCall, wait_for
from tilework.capture.program.merging import (
    HeldBack,
    Touched,
    is_barrier,
    merge_collectives,
    up_to_backward,
)
from tilework.cores import has_spare_core
from tilework.errors import CaptureError


def table_of(graph: Graph, name: str) -> str:
    """The operators, collectives and memory of a program, as lines of text. Local."""
    collectives = [each for each in graph.instructions if isinstance(each.target, GroupCall)]
    moved = sum(each.nbytes for each in collectives)
    kinds = Counter(each.kind for each in graph.instructions)
    inputs = {id(each.value.memory): each.value.memory for each in graph.inputs}
    held = sum(memory.nbytes for memory in inputs.values() if memory is not None)
    lines = [
        f"{name}: {kinds['operator']} operators, {len(collectives)} collectives of {moved} bytes",
        f"inputs: {len(graph.inputs)} tensors, {held} bytes; at most {peak_bytes(graph)} more",
    ]
    for number, each in enumerate(collectives):
        place = each.site.rsplit("/", 1)[-1]
        lines.append(f"  {number}: {each.name}, {each.nbytes} bytes, {place}")
    return "\n".join(lines)


def peak_bytes(graph: Graph) -> int:
    """The largest number of bytes that a program's values take at once, besides the inputs."""
    of_inputs = {id(each.value.memory) for each in graph.inputs}
    users: dict[int, int] = {}
    live = peak = 0

    def change(memory: ProgramMemory | None, by: int) -> None:
        nonlocal live
        if memory is None or id(memory) in of_inputs:
            return
        before = users.get(id(memory), 0)
        users[id(memory)] = before + by
        if by > 0 and not before:
            live += memory.nbytes
        elif by < 0 and before == 1:
            live -= memory.nbytes

    for each, dead in zip(graph.instructions, graph.last_uses(), strict=True):
        for out in each.made:
            change(out.memory, 1)
        peak = max(peak, live)
        for value in dead:
            change(value.memory, -1)
    return peak


#: A collective of fewer bytes, or beside work on fewer bytes, is not started early.
LEAST_BYTES = 1 << 18
#: No collective starts while more bytes are in flight; a program may need so many more.
MOST_BYTES = 1 << 26


def start_early(graph: Graph) -> Graph:
    """Start collectives early and wait for them late, so that operators run meanwhile. Local.

    A collective starts right after the instructions that it needs, and ends right before the first
    instruction that needs it; this instruction moves behind those that do not. Collectives keep
    their order, also those of several groups. The pass leaves alone collectives below 256 KiB,
    collectives with as little work beside them, and on CPUs all collectives unless each rank has a
    second core. It leaves a program alone that would need 64 MiB more.
    """
    if not any(map(_may_start, graph.instructions)):
        return graph
    border = up_to_backward(graph)
    late = _WaitingLate(graph.new_values())
    for each in _starting_early(graph.instructions[:border]):
        late.add(each)
    late.end()
    made = replace(graph, instructions=[*late.order, *graph.instructions[border:]])
    splits = any(each.function is wait_for for each in late.order)
    return made if splits and peak_bytes(made) <= peak_bytes(graph) + MOST_BYTES else graph


def _may_start(each: Instruction) -> bool:
    call = each.function
    if not isinstance(call, GroupCall) or call.is_async or each.nbytes < LEAST_BYTES:
        return False
    on_cpu = all(value.device == torch.device("cpu") for value in each.inputs())
    return not on_cpu or has_spare_core(call.group.size())


def _starting_early(instructions: Iterable[Instruction]) -> Iterator[Instruction]:
    """The instructions, where each collective precedes the operators that it does not need."""
    between = HeldBack()
    for each in instructions:
        touched = Touched(each)
        if each.kind in ("operator", "draw"):
            between.hold(each, touched)
        else:
            yield from between.release(touched if _may_start(each) else None)
            yield each
            yield from between.release()
    yield from between.release()


class _Flight(NamedTuple):
    """A collective that was started, the wait for it, and what both touch."""

    blocking: Instruction
    wait: Instruction
    touched: Touched
    #: The position of the start.
    position: int
    #: The bytes that operators before it touched.
    before: int


class _WaitingLate:
    """Starts each collective where it stands, and waits only before the result is needed."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self.order: list[Instruction] = []
        self._numbers, self._held, self._done = numbers, HeldBack(), 0
        self._flying: list[_Flight] = []

    def add(self, each: Instruction) -> None:
        touched = Touched(each)
        if each.kind in ("operator", "draw"):
            if self._held.meet(touched) or self._met_by(touched):
                self._held.hold(each, touched)
            else:
                self._emit(each)
            return
        if is_barrier(each) or sum(x.blocking.nbytes for x in self._flying) > MOST_BYTES:
            self.end()
        for other in self._held.release(touched):
            self._emit(other)
        if _may_start(each):
            self._start(each)
        else:
            self._emit(each)

    def end(self) -> None:
        """Let nothing be in flight."""
        for each in self._held.release():
            self._emit(each)
        self._land(self._flying)

    def _met_by(self, touched: Touched) -> list[_Flight]:
        """The collectives that must end before an instruction that touches this."""
        return [each for each in self._flying if each.touched.meet(touched)]

    def _start(self, each: Instruction) -> None:
        call: GroupCall = each.function
        begun = GroupCall(call.group, call.method, replace(call.opts, asyncOp=True), call.others)
        work = Value(next(self._numbers), text="Work")
        # The wait has the tensors, too: so they live until then.
        wait = replace(each, function=wait_for, args=(work, *each.args), kind="wait", name="wait")
        wait = replace(wait, number=0, nbytes=0)
        self._emit(replace(each, function=begun, outputs=[work]))
        place = len(self.order) - 1
        self._flying.append(_Flight(each, wait, Touched(wait), place, self._done))

    def _emit(self, each: Instruction) -> None:
        self._land(self._met_by(Touched(each)))
        self.order.append(each)
        self._done += _work_bytes(each)

    def _land(self, flights: list[_Flight]) -> None:
        for each in flights:
            if self._done - each.before < LEAST_BYTES:
                self.order[each.position] = each.blocking
            else:
                self.order.append(each.wait)
        self._flying = [each for each in self._flying if each not in flights]


def _work_bytes(each: Instruction) -> int:
    """The bytes of the largest memory that an operator touches; 0 for a view."""
    made = {out.memory for out in each.made}
    given = {value.memory for value in each.inputs()}
    if each.kind != "operator" or not (each.writes or made - given):
        return 0
    return max([memory.nbytes for memory in made | given if memory is not None], default=0)


def drop_dead(graph: Graph) -> Graph:
    """Drop operators whose results nothing needs: trials of layouts and strides, dead copies.

    Collectives stay, as other ranks take part in them, and random draws, which the generator
    counts.
    """
    kept = {value.number for value in graph.kept()}
    live = _live(graph, set(kept))
    used = kept.union(*[{value.number for value in each.inputs()} for each in live])
    instructions = [
        replace(each, outputs=[x if x and x.number in used else None for x in each.outputs])
        for each in live
    ]
    inputs = [each for each in graph.inputs if each.value.number in used]
    return replace(graph, inputs=inputs, instructions=instructions)


def _live(graph: Graph, needed: set[int]) -> list[Instruction]:
    """The instructions that give a needed value, write to memory that is used, or do more."""
    memories = {each.value.memory for each in graph.inputs}
    memories |= {value.memory for value in graph.kept()}
    live: list[Instruction] = []
    for each in reversed(graph.instructions):
        gives = any(out.number in needed for out in each.made)
        if gives or each.kind != "operator" or not memories.isdisjoint(each.writes):
            live.append(each)
            needed |= {value.number for value in each.inputs()}
            memories |= {value.memory for value in each.inputs()}
    return live[::-1]


#: The passes of programs that are recorded from now on, in order, the same on all ranks. A list to
#: add to and to remove from.
PASSES: list[Callable[[Graph], Graph]] = [drop_dead, merge_collectives, start_early]


def run_passes(graph: Graph) -> Graph:
    """The program that all passes make of a recorded program. Collective over the groups in it."""
    for number, each in enumerate(graph.instructions, 1):
        each.number = number
    for function in PASSES:
        graph = function(graph)
        if not isinstance(graph, Graph):
            kind = type(graph).__name__
            raise CaptureError(f"the pass {function.__name__} returned {kind}, not a Graph")
    return replace(graph)  # which looks again at the order


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
