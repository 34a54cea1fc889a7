"""The pass that merges small collectives."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tilework.capture.program.graph import (
    BOUNDARY,
    Expected,
    Graph,
    Instruction,
    ProgramMemory,
    Value,
)
from tilework.capture.program.group_call import GroupCall, wait_for
from tilework.comm.backends.internal import backend_for
from tilework.comm.contract import NO_FAST_PATH, Capability
from tilework.comm.operations.internal import agree

#: By kind of instruction, further reasons to stay in order: random numbers, communication.
_IN_ORDER: dict[str, tuple[str, ...]] = {
    "draw": ("draws",),
    "collective": ("groups",),
    "wait": ("groups",),
    "call": ("draws", "groups"),
}


class Touched:
    """The values and memory that instructions read and write; ``each`` is the first, if any.

    ``is_free``: this collective may change places with other collectives.
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


aten = torch.ops.aten
#: Collectives are merged up to this size together.
SMALL_BYTES = 1 << 18


def merge_collectives(graph: Graph) -> Graph:
    """Reduce several small tensors by a single all_reduce. Collective over the groups.

    Merged are all_reduces of equal group, reduction and dtype, of 256 KiB together, none of which
    needs the result of another, on any rank. The group's backend must promise that bits do not
    depend on a tensor's size; and it must have no fast path, on which several calls take less time
    than the copies.
    """
    border = up_to_backward(graph)
    before = graph.instructions[:border]
    joins: dict[Any, list[bool]] = {}
    runs = _runs(before, lambda _: True) if any(map(_key_of, before)) else []
    for i, each in [item for run in runs for item in enumerate(run)]:
        if _key_of(each) is not None:
            joins.setdefault(each.target.group, []).append(i > 0)
    # Ranks have unlike local operators: a collective joins another where it may on all ranks.
    agreed = {
        group: map(all, zip(*agree(partial(list, mine), group), strict=False))
        for group, mine in joins.items()
        if len(mine) > 1
    }
    if not agreed:
        return graph
    runs = _runs(before, lambda each: next(agreed.get(each.target.group, iter(())), False))
    if all(len(run) == 1 for run in runs):
        return graph
    numbers = graph.new_values()
    made = [x for run in runs for x in (_merged(run, numbers) if len(run) > 1 else run)]
    return replace(graph, instructions=made + graph.instructions[border:])


def _key_of(each: Instruction) -> Any:
    """A key: all_reduces with equal keys may be merged. None: not to be merged."""
    call = each.function
    if not isinstance(call, GroupCall) or call.method != "allreduce" or call.is_async:
        return None
    value = each.args[0][0]
    end = backend_for(call.group, value.device.type)
    is_exact = Capability.SAME_BITS not in end.lacks and not value.dtype.is_complex
    if end.fast_path is not NO_FAST_PATH or not is_exact or each.nbytes > SMALL_BYTES:
        return None
    return call.group, call.opts, value.dtype, value.device


def _runs(
    instructions: list[Instruction], allowed: Callable[[Instruction], bool]
) -> list[list[Instruction]]:
    """The instructions, in an order in which collectives that may be merged stand together."""
    found: list[list[Instruction]] = []
    held, run = HeldBack(), list[Instruction]()

    def release() -> None:
        found.extend([list(run)] if run else [])
        found.extend([each] for each in held.release() if each not in run)
        run.clear()

    for each in instructions:
        key = _key_of(each)
        touched = Touched(each, is_free=key is not None)
        if key is not None:
            together = [*run, each]
            is_small = sum(x.nbytes for x in together) <= SMALL_BYTES
            joins = allowed(each) and is_small and key == _key_of(together[0])
            if not joins or held.meet(touched):
                release()
            run.append(each)
        elif is_barrier(each) or each.kind not in ("operator", "draw"):
            release()
        if key is not None or held.meet(touched):
            held.hold(each, touched)
        else:
            found.append([each])
    release()
    return found


def _merged(run: list[Instruction], numbers: Iterator[int]) -> list[Instruction]:
    """Instructions that do what several all_reduces do, with a single all_reduce."""
    values = [each.args[0][0] for each in run]
    first, memory = values[0], ProgramMemory(sum(each.nbytes for each in run))
    # Without shapes, which would be constants: batches of several sizes share a program.
    about = str(first.dtype).removeprefix("torch."), (), first.dtype, first.device
    flat, *parts = [Value(next(numbers), memory, *about) for _ in range(len(values) + 1)]
    join, part, copy = (
        aten.flatten_dense_tensors.default,
        aten.unflatten_dense_tensors.default,
        aten._foreach_copy_.default,
    )
    written = tuple(value.memory for value in values)
    made = [
        Instruction(join, (values,), outputs=[flat]),
        replace(run[0], args=([flat],), writes=(memory,), nbytes=memory.nbytes, number=0),
        Instruction(part, (flat, values), outputs=list(parts), form="flat"),
        Instruction(copy, (values, parts), writes=written),
    ]
    return [replace(each, site=run[0].site) for each in made]
