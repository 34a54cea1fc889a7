"""Passes: functions that make a program from a program, between the recording and the back end.

Each pass is a function from :class:`~tilework.capture.program.graph.Graph` to ``Graph``, and leaves
the given graph as it is. The program that it returns gives the same bits, and has the same
collectives in the same order on all ranks of a group. A pass may be collective over the groups of
the program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tilework.capture.program.graph import Graph, Instruction
from tilework.capture.program.merging import merge_collectives
from tilework.capture.program.starting import start_early
from tilework.errors import CaptureError


def drop_dead(graph: Graph) -> Graph:
    """Drop operators whose results nothing needs: trials of layouts and strides, dead copies.

    Collectives stay, because other ranks take part in them. Random draws stay, because the
    generator counts them.
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
    """The program that all passes make of a recorded program. Collective over the groups in it.

    Raises:
        CaptureError: A pass returned something else than a graph.
    """
    for number, each in enumerate(graph.instructions, 1):
        each.number = number
    for function in PASSES:
        graph = function(graph)
        if not isinstance(graph, Graph):
            kind = type(graph).__name__
            raise CaptureError(f"the pass {function.__name__} returned {kind}, not a Graph")
    return replace(graph)  # which looks again at the order
