"""The graph of ranks that wait for each other, and the cycles in it. Fit for thousands of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tilework.comm.flight.history import Group, History, failed, stuck
from tilework.comm.flight.ring import ANY_PEER, RUNNING, Entry

#: Words in the error of ranks that noticed the cycle themselves.
IN_A_CIRCLE = "wait for each other in a circle"


@dataclass(frozen=True)
class Wait:
    """A rank that waits in an operation, or gave up, and the ranks that it waits for.

    Attributes:
        rank: The waiting rank.
        group: The group of the operation.
        entry: The operation, as the waiting rank recorded it.
        awaited: The global ranks that it waits for.
    """

    rank: int
    group: Group
    entry: Entry
    awaited: tuple[int, ...]

    @property
    def place(self) -> str:
        """The name of the group and the number of the operation, as words."""
        number = f", operation #{self.entry.number}" if self.entry.number else ""
        return f"group {self.group.name!r}{number}"


def waits(history: History) -> list[Wait]:
    """All waits in the records.

    For each rank and group: the first collective that runs or failed, and each message that runs or
    failed.
    """
    return [
        wait
        for group in history.groups
        for wait in (*_collective_waits(group), *_message_waits(group))
    ]


def _collective_waits(group: Group) -> Iterator[Wait]:
    for rank, calls in group.calls.items():
        # A rank's further operations are queued behind the first.
        first = min((n for n, entry in calls.items() if stuck(entry)), default=None)
        if first is not None:
            yield Wait(rank, group, calls[first], group.absent(first))


def _message_waits(group: Group) -> Iterator[Wait]:
    ends = {
        (rank, is_send(entry), entry.tag, entry.peer)
        for rank, messages in group.messages.items()
        for entry in messages
        if entry.outcome == RUNNING
    }
    for rank, messages in group.messages.items():
        for entry in messages:
            if not stuck(entry) or entry.peer is None:
                continue
            if entry.peer == ANY_PEER:
                others = tuple(r for r in group.ranks if r != rank)
            else:
                end = (entry.peer, not is_send(entry), entry.tag)
                met = (*end, rank) in ends or (*end, ANY_PEER) in ends
                others = () if met else (entry.peer,)
            yield Wait(rank, group, entry, others)


def is_send(entry: Entry) -> bool:
    """True if a message is a send; False if it is a receive."""
    return entry.what.startswith("send")


def blocking(history: History, all_waits: list[Wait]) -> dict[int, list[Wait]]:
    """For each rank that cannot go on, the waits that hold it up.

    A rank with asynchronous operations in flight may be computing: the rank's stack tells which
    operation, if any, the rank waits for. A wait that was given up counts as a wait.
    """
    by_rank: dict[int, list[Wait]] = {}
    all_own: dict[int, list[Wait]] = {}
    for wait in all_waits:
        all_own.setdefault(wait.rank, []).append(wait)
    for rank, record in history.records.items():
        own = all_own.get(rank, [])
        given_up = [wait for wait in own if _gave_up(wait.entry)]
        running = [wait for wait in own if wait.entry.outcome == RUNNING]
        stack = record.stacks[0] if record.stacks else None
        if stack is not None and not stack.inside:
            running = []
        elif stack is not None:
            running = [wait for wait in running if wait.entry.site in stack.frames] or running
        if running or given_up:
            by_rank[rank] = running or given_up
    return by_rank


def _gave_up(entry: Entry) -> bool:
    why = "TimeoutError", IN_A_CIRCLE
    return failed(entry) and any(words in entry.outcome for words in why)


def circles(held_up: Mapping[int, Sequence[Wait]], most: int = 16) -> list[list[Wait]]:
    """Cycles of ranks that wait for each other, each as a list of waits.

    In a cycle, each wait is for the rank of the next wait, and the last is for the rank of the
    first. There is the shortest cycle through each rank that is in no earlier cycle, at most
    ``most`` cycles. Linear in the number of waits and of awaited ranks.
    """
    graph = _Graph(held_up)
    cycles: list[list[Wait]] = []
    covered: set[int] = set()
    for component in graph.components():
        for start in component:
            if start in covered or len(cycles) == most:
                continue
            cycle = graph.cycle_from(start, component)
            covered.update(wait.rank for wait in cycle)
            cycles += [cycle] if cycle else []
    return cycles


class _Graph:
    """Ranks that are held up, and the ranks that they wait for.

    Ranks that wait in the same operation share a tuple of awaited ranks. The tuple is a separate
    node, because a thousand ranks that wait for a thousand others would be a million edges.
    """

    def __init__(self, held_up: Mapping[int, Sequence[Wait]]) -> None:
        self._waits: dict[int, list[tuple[int, Wait]]] = {}
        #: The awaited ranks of each tuple node; node numbers are negative.
        self._awaited: dict[int, tuple[int, ...]] = {}
        nodes: dict[int, int] = {}
        for rank, waits in held_up.items():
            for wait in waits:
                # A message may come from several ranks, so a single rank does not hold up the
                # receiver.
                if wait.entry.peer == ANY_PEER and len(wait.awaited) > 1:
                    continue
                node = nodes.setdefault(id(wait.awaited), -1 - len(nodes))
                self._awaited[node] = wait.awaited
                self._waits.setdefault(rank, []).append((node, wait))

    def _next(self, node: int) -> Sequence[int]:
        if node < 0:
            return self._awaited[node]
        return [awaited for awaited, _ in self._waits.get(node, ())]

    def components(self) -> list[list[int]]:
        """The ranks of each strongly connected component, without components of a single node.

        Tarjan, "Depth-first search and linear graph algorithms" (1972), without recursion.
        """
        order: dict[int, int] = {}
        low: dict[int, int] = {}
        stack: list[int] = []
        on_stack: set[int] = set()
        components: list[list[int]] = []

        def enter(node: int) -> tuple[int, Iterator[int]]:
            order[node] = low[node] = len(order)
            stack.append(node)
            on_stack.add(node)
            return node, iter(self._next(node))

        for root in self._waits:
            path = [] if root in order else [enter(root)]
            while path:
                node, following = path[-1]
                after = next(following, None)
                if after is None:
                    path.pop()
                    if path:
                        low[path[-1][0]] = min(low[path[-1][0]], low[node])
                    if low[node] == order[node]:
                        component = [stack.pop()]
                        while component[-1] != node:
                            component.append(stack.pop())
                        on_stack.difference_update(component)
                        if len(component) > 1:
                            components.append(sorted(rank for rank in component if rank >= 0))
                elif after not in order:
                    path.append(enter(after))
                elif after in on_stack:
                    low[node] = min(low[node], order[after])
        return components

    def cycle_from(self, start: int, component: Sequence[int]) -> list[Wait]:
        """The waits on the shortest way from rank ``start`` back to ``start``; empty if there is
        none.

        All ranks on the way are in ``component``.
        """
        inside = set(component)
        #: By rank: the wait that led to the rank.
        reached: dict[int, Wait] = {}
        expanded: set[int] = set()
        queue = [start]
        for rank in queue:
            for node, wait in self._waits.get(rank, ()):
                if node in expanded:
                    continue
                expanded.add(node)
                for other in wait.awaited:
                    if other in inside and other not in reached:
                        reached[other] = wait
                        queue.append(other)
                if start in reached:
                    return _way_back(start, reached)
        return []


def _way_back(start: int, reached: Mapping[int, Wait]) -> list[Wait]:
    cycle = [reached[start]]
    while cycle[-1].rank != start:
        cycle.append(reached[cycle[-1].rank])
    return cycle[::-1]
