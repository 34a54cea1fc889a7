"""The graph of ranks that wait for each other, and the cycles in it. Fit for thousands of ranks.

Pure: the waits may be read from a store, or from files, or be those of ranks that never ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, Protocol, TypeVar

#: Words in every error about a cycle, also of ranks that noticed the cycle themselves.
IN_A_CIRCLE: Final = "wait for each other in a circle"


class Waiting(Protocol):
    """A wait of a rank that continues only after each of the awaited ranks has acted.

    Leave out waits that any one of several ranks can end.
    """

    @property
    def rank(self) -> int:
        """The waiting rank: a number from 0."""
        ...

    @property
    def awaited(self) -> Sequence[int]:
        """The ranks that it waits for."""
        ...


_Wait = TypeVar("_Wait", bound=Waiting)


def cycles(waits: Iterable[_Wait], most: int = 16) -> list[list[_Wait]]:
    """Cycles of ranks that wait for each other, each as a list of waits.

    In a cycle, each wait is for the rank of the next wait, and the last is for the rank of the
    first. There is the shortest cycle through each rank that is in no earlier cycle, at most
    ``most`` cycles. A rank may have several waits.

    Linear in the number of waits and of awaited ranks. Waits that share a sequence of awaited ranks
    (the same object) count the sequence once: a thousand ranks that wait for a thousand others need
    not be a million edges.

    Example:
        >>> from typing import NamedTuple
        >>> class Recv(NamedTuple):
        ...     rank: int
        ...     awaited: tuple[int, ...]
        >>> [each.rank for each in cycles([Recv(0, (1,)), Recv(1, (2,)), Recv(2, (1,))])[0]]
        [1, 2]
    """
    of_rank: dict[int, list[_Wait]] = {}
    for wait in waits:
        of_rank.setdefault(wait.rank, []).append(wait)
    found: list[list[_Wait]] = []
    covered: set[int] = set()
    for component in _components(_nodes(of_rank)):
        inside = {rank: of_rank[rank] for rank in component}
        for start in component:
            if start not in covered and len(found) < most:
                cycle = cycle_through(start, inside.get)
                covered.update(wait.rank for wait in cycle)
                found += [cycle] if cycle else []
    return found


def cycle_through(start: int, waits_of: Callable[[int], Iterable[_Wait] | None]) -> list[_Wait]:
    """The waits on a shortest way from rank ``start`` back to ``start``; empty if there is none.

    ``waits_of`` is asked once for each rank that can be reached, the nearest ranks first, and for
    none after the way is found.
    """
    #: By rank: the wait that led to the rank.
    reached: dict[int, _Wait] = {}
    #: By id: the sequences of awaited ranks that were followed.
    followed: dict[int, Sequence[int]] = {}
    queue = [start]
    for rank in queue:
        for wait in waits_of(rank) or ():
            awaited = wait.awaited
            if id(awaited) in followed:
                continue
            followed[id(awaited)] = awaited
            fresh = dict.fromkeys((other for other in awaited if other not in reached), wait)
            reached.update(fresh)
            if start in reached:
                return _way_back(start, reached)
            queue += fresh
    return []


def _way_back(start: int, reached: Mapping[int, _Wait]) -> list[_Wait]:
    cycle = [reached[start]]
    while cycle[-1].rank != start:
        cycle.append(reached[cycle[-1].rank])
    return cycle[::-1]


def _nodes(of_rank: Mapping[int, Sequence[Waiting]]) -> dict[int, Sequence[int]]:
    """The nodes that follow each node: ranks, and negative numbers for sequences of ranks."""
    nodes: dict[int, Sequence[int]] = {}
    for rank, waits in of_rank.items():
        sequences = [wait.awaited for wait in waits]
        nodes[rank] = [-1 - id(sequence) for sequence in sequences]
        nodes.update(zip(nodes[rank], sequences, strict=True))
    return nodes


def _components(nodes: Mapping[int, Sequence[int]]) -> Iterator[list[int]]:
    """The ranks of each strongly connected component that has several nodes.

    Kosaraju's algorithm, without recursion.
    """
    #: All nodes, each after those that can be reached from it, but for cycles.
    order: dict[int, None] = {}
    seen: set[int] = set()
    for root in nodes:
        path = [(root, iter(nodes[root]))] if root not in seen else []
        while path:
            seen.add(path[-1][0])
            after = next((node for node in path[-1][1] if node not in seen), None)
            if after is None:
                order[path.pop()[0]] = None
            else:
                path.append((after, iter(nodes.get(after, ()))))
    before: dict[int, list[int]] = {}
    for node, following in nodes.items():
        for after in following:
            before.setdefault(after, []).append(node)
    while order:
        component = [order.popitem()[0]]
        for node in component:
            for other in before.get(node, ()):
                if other in order:
                    del order[other]
                    component.append(other)
        if len(component) > 1:
            yield sorted(rank for rank in component if rank >= 0)
