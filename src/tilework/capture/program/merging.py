"""The pass that merges small collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tilework.capture.program.graph import Graph, Instruction, ProgramMemory, Value
from tilework.capture.program.group_call import GroupCall
from tilework.capture.program.reordering import HeldBack, Touched, is_barrier, up_to_backward
from tilework.comm.backends.internal import backend_for
from tilework.comm.contract import NO_FAST_PATH, Capability
from tilework.comm.operations.internal import agree

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


def _fit(run: list[Instruction]) -> bool:
    """True if the last all_reduce has the key of the first, and all are small together."""
    is_small = sum(each.nbytes for each in run) <= SMALL_BYTES
    return is_small and bool(_key_of(run[-1]) == _key_of(run[0]))


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
            joins = allowed(each) and _fit([*run, each])
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
