"""A program in numbers: operators, collectives, memory."""

from __future__ import annotations

from collections import Counter

from tilework.capture.program.graph import Graph, ProgramMemory
from tilework.capture.program.group_call import GroupCall


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
