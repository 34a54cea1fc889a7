"""Passes: functions that make a program from a program, between the recording and the back end.

Each pass is a function from :class:`~tilework.capture.program.graph.Graph` to ``Graph``, and leaves
the given graph as it is. The program that it returns gives the same bits, and has the same
collectives in the same order on all ranks of a group. A pass may be collective over the groups of
the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace

from tilework.capture.program.graph import Graph, Instruction
from tilework.capture.program.merging import merge_collectives
from tilework.capture.program.starting import start_early
from tilework.errors import CaptureError

GraphPass = Callable[[Graph], Graph]
_chosen: ContextVar[tuple[GraphPass, ...] | None] = ContextVar("tilework_passes", default=None)


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


#: The passes of all programs, in order.
_registered: list[GraphPass] = [drop_dead, merge_collectives, start_early]


def add_pass(function: GraphPass) -> GraphPass:
    """Run a pass on each program that is recorded from now on, after those that are there.

    Usable as a decorator. All ranks have to add the same passes in the same order.

    Args:
        function: Takes a graph, and returns another or the same; see :mod:`passes
            <tilework.capture.program.passes>` for what it has to promise. The function's name is
            the pass's name.

    Raises:
        ValueError: There is a pass of that name.

    Example:
        >>> @add_pass
        ... def count(graph):
        ...     print(len(graph.instructions), "instructions")
        ...     return graph
        >>> import torch
        >>> from tilework.capture import capture
        >>> double = capture(lambda x: x + x)
        >>> for _ in range(3):
        ...     _ = double(torch.ones(2))
        1 instructions
        >>> remove_pass("count")
    """
    if function.__name__ in passes():
        raise ValueError(f"there is a pass {function.__name__!r} already: remove_pass() removes it")
    _registered.append(function)
    return function


def remove_pass(name: str) -> None:
    """Remove a pass from those of later programs.

    Raises:
        ValueError: There is no pass of that name.
    """
    if name not in passes():
        raise ValueError(f"there is no pass {name!r}, only {', '.join(passes())}")
    _registered[:] = [each for each in _registered if each.__name__ != name]


def passes() -> list[str]:
    """The names of the passes, in order."""
    return [each.__name__ for each in _registered]


@contextmanager
def only_passes(*functions: GraphPass) -> Iterator[None]:
    """Within the block, this rank records programs with these passes alone, in this order.

    For tests of a pass, and to find the pass that does something wrong.
    """
    token = _chosen.set(functions)
    try:
        yield
    finally:
        _chosen.reset(token)


def run_passes(graph: Graph) -> Graph:
    """The program that all passes make of a recorded program. Collective over the groups in it.

    Raises:
        CaptureError: A pass returned no program, or a value is used before it is made.
    """
    numbered = [replace(each, number=i) for i, each in enumerate(graph.instructions, 1)]
    graph = replace(graph, instructions=numbered)
    chosen = _chosen.get()
    for function in _registered if chosen is None else chosen:
        graph = function(graph)
        if not isinstance(graph, Graph):
            kind = type(graph).__name__
            raise CaptureError(f"the pass {function.__name__} returned {kind}, not a Graph")
        unknown = graph.unmade()
        if unknown:
            raise CaptureError(
                f"after the pass {function.__name__}, t{min(unknown)} is used and not made before: "
                f"move or drop an instruction together with those that use the outputs"
            )
    return graph
