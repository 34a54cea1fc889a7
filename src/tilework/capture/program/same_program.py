"""Agreement of ranks on a program: all ranks of a group have the group's collectives in one order.

Ranks compare once, when a program is made. Ranks with different shards have different local
operators; therefore they compare their communication: by group, the operations, reductions, dtypes
and lines. Each collective of a call then carries a digest of that text, the number of the call, and
the number of the collective: if a rank runs another program, or none, the first collective raises.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from tilework.capture.program.graph import Graph, Instruction, Value, values_in
from tilework.capture.program.group_call import GroupCall
from tilework.comm.agreement import agree
from tilework.comm.contract import ProcessGroup
from tilework.dtensor.provenance.digests import stable_digest
from tilework.errors import CaptureError

_MOST = (1 << 61) - 1


@dataclass
class Digests:
    """The digests of a program's collectives.

    Attributes:
        bases: For each group, in the order of the program, a digest of all of the collectives.
        calls: The number of calls of the program so far.
        collectives: For each group, the texts of the collectives, in order.
    """

    bases: list[int]
    collectives: list[list[str]]
    calls: int = 0

    def of_next_call(self) -> list[int]:
        """Count a call; return for each group the digest of the call's first collective."""
        self.calls += 1
        return [(hash((base, self.calls)) & (_MOST >> 1)) + 1 for base in self.bases]


def compare_program(graph: Graph, name: str, joins: int | None = None) -> tuple[Digests, bool]:
    """Compare a program with other ranks' programs. Collective over each group of the program.

    Args:
        graph: The program.
        name: The step's name.
        joins: The earlier program that this rank's record may run; None: a new program.

    Returns:
        The digests of a new program; and True if all ranks may run the same earlier program.

    Raises:
        CaptureError: On every rank of a group: ranks have different collectives of the group.
    """
    texts: dict[ProcessGroup, list[str]] = {}
    for each in graph.instructions:
        if isinstance(each.target, GroupCall):
            texts.setdefault(each.target.group, []).append(_text(each))
    for group, mine in texts.items():
        gathered: list[tuple[int, list[str]]] = agree(partial(_sent, joins, mine), group)
        # Group by group, for ranks of a mesh that share no group to come to the same answer.
        joins = joins if all(number == joins for number, _ in gathered) else None
        every = [theirs for _, theirs in gathered]
        for other, theirs in enumerate(every):
            if theirs == every[0]:
                continue
            number = next(
                (i for i, (a, b) in enumerate(zip(every[0], theirs, strict=False)) if a != b),
                min(len(every[0]), len(theirs)),
            )
            sides = [
                texts[number] if number < len(texts) else "nothing" for texts in (every[0], theirs)
            ]
            ranks = group.global_ranks
            raise CaptureError(
                f"ranks recorded different programs of {name}: collective {number} is {sides[0]} "
                f"on rank {ranks[0]} and {sides[1]} on rank {ranks[other]}. All ranks of a group "
                f"have to call the same collectives, in one order: look for a branch on the rank "
                f"or on data"
            )
    bases = [stable_digest("\n".join([name, *each])) for each in texts.values()]
    return Digests(bases, list(texts.values())), joins is not None


def _sent(joins: int | None, texts: list[str]) -> tuple[int, list[str]]:
    return -1 if joins is None else joins, texts


def _text(each: Instruction) -> str:
    call: Any = each.target
    values: list[Value] = list(values_in(each.args))
    dtype = str(values[0].dtype).removeprefix("torch.") if values else ""
    return f"{call.method} ({call.opts.reduceOp}) of {dtype} at {each.site}"
