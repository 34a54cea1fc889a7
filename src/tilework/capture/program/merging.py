"""The pass that merges small collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from tilework.capture.program.graph import Graph, Instruction, ProgramMemory, Value
from tilework.capture.program.group_call import GroupCall
from tilework.capture.program.reordering import HeldBack, Touched, is_barrier, up_to_backward
from tilework.comm.agreement import agree
from tilework.comm.backends.per_device import backend_for
from tilework.comm.capabilities import Capability
from tilework.comm.contract import NO_FAST_PATH

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
    for run in _runs(before, lambda _: True):
        for i, each in enumerate(run):
            if _may_merge(each):
                joins.setdefault(each.target.group, []).append(i > 0)
    agreed = {group: _agreed(mine, group) for group, mine in joins.items() if len(mine) > 1}
    if not any(map(any, agreed.values())):
        return graph
    flags = {group: iter(mine) for group, mine in agreed.items()}
    numbers = graph.new_values()
    made: list[Instruction] = []
    for run in _runs(before, lambda each: next(flags.get(each.target.group, iter(())), False)):
        made += _merged(run, numbers) if len(run) > 1 else run
    return replace(graph, instructions=made + graph.instructions[border:])


def _agreed(mine: list[bool], group: Any) -> list[bool]:
    """For each collective of a group, True if it may join the collective before on all ranks."""
    every = agree(lambda: mine, group)
    return [all(flags) for flags in zip(*every, strict=False)]


def _may_merge(each: Instruction) -> bool:
    call = each.function
    if not isinstance(call, GroupCall) or call.method != "allreduce" or call.is_async:
        return False
    value = each.args[0][0]
    end = backend_for(call.group, value.device.type)
    return (
        end.fast_path is NO_FAST_PATH
        and Capability.SAME_BITS not in end.lacks
        and not value.dtype.is_complex
        and each.nbytes < SMALL_BYTES
    )


def _key(each: Instruction) -> Any:
    value = each.args[0][0]
    return each.target.group, each.target.opts, value.dtype, value.device


def _runs(
    instructions: list[Instruction], allowed: Callable[[Instruction], bool]
) -> Iterator[list[Instruction]]:
    """The instructions in an order in which collectives stand together that may be merged.

    Each item is an instruction, or the collectives that may be merged.

    Args:
        instructions: The instructions of a program.
        allowed: Called with each collective in order: may it join the collective before?
    """
    held, run = HeldBack(), list[Instruction]()

    def released() -> Iterator[list[Instruction]]:
        if run:
            yield list(run)
        yield from [[each] for each in held.release() if each not in run]
        run.clear()

    for each in instructions:
        merges = _may_merge(each)
        touched = Touched(each, is_free=merges)
        if merges:
            total = sum([x.nbytes for x in run], each.nbytes)
            fits = bool(run) and _key(run[0]) == _key(each) and total <= SMALL_BYTES
            if not (allowed(each) and fits and not held.meet(touched)):
                yield from released()
            run.append(each)
            held.hold(each, touched)
        elif is_barrier(each) or each.kind not in ("operator", "draw"):
            yield from released()
            yield [each]
        elif held.meet(touched):
            held.hold(each, touched)
        else:
            yield [each]
    yield from released()


def _merged(run: list[Instruction], numbers: Iterator[int]) -> list[Instruction]:
    """Instructions that do what several all_reduces do, with a single all_reduce."""
    values = [each.args[0][0] for each in run]
    nbytes = sum(each.nbytes for each in run)
    memory = ProgramMemory(nbytes)
    # Without shapes, which would be constants: batches of several sizes share a program.
    dtype, device, site = values[0].dtype, values[0].device, run[0].site
    flat, *parts = [
        Value(next(numbers), memory, str(dtype).removeprefix("torch."), (), dtype, device)
        for _ in range(len(values) + 1)
    ]
    written = tuple(value.memory for value in values)
    return [
        Instruction(aten.flatten_dense_tensors.default, (values,), outputs=[flat], site=site),
        replace(run[0], args=([flat],), writes=(memory,), nbytes=nbytes, number=0),
        Instruction(
            aten.unflatten_dense_tensors.default,
            (flat, values),
            outputs=list(parts),
            form="flat",
            site=site,
        ),
        Instruction(aten._foreach_copy_.default, (values, parts), writes=written, site=site),
    ]
