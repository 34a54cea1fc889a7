"""Sizes and algorithms that follow from a host's topology, by a model. Pure.

The model and its figures are in docs/algorithms/topology.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from tilework.cores import Topology

#: Nanoseconds to get a cache line from another core, within and between memory nodes.
NEAR_NS, FAR_NS = 60.0, 200.0
#: Nanoseconds that each reader of a line adds for the next, and the lines that a core awaits at
#: once.
READER_NS, AT_ONCE = 20.0, 8
#: Two levels must take at most this share of the flat way's time: the model is too coarse for
#: smaller gains.
_CLEARLY: Final = 0.75


@dataclass(frozen=True)
class TuningPlan:
    """The best sizes and algorithms for a group, by the model.

    Args:
        nodes: Memory nodes with ranks, if ranks are spread evenly.
        ranks_per_node: Ranks on the fullest node.
        rounds: How ranks learn that all have come. ``"flat"``: each rank looks at all. ``"by
            node"``: one rank of each node looks at that node's ranks, then at the other nodes'
            first ranks.
        long_all_reduce: ``"flat"``: each rank reduces a part of every rank's data. ``"by node"``:
            within the nodes first, so that every byte crosses between two nodes once.
        cache_sharers: Ranks that use the same second-level cache at the same time.
        chunk_bytes: The most of an outbox that a round should use; 0: no bound is known.
    """

    nodes: int
    ranks_per_node: int
    rounds: Literal["flat", "by node"]
    long_all_reduce: Literal["flat", "by node"]
    cache_sharers: int
    chunk_bytes: int

    def __str__(self) -> str:
        return f"rounds {self.rounds}, long reductions {self.long_all_reduce}"


def plan_for(topology: Topology, ranks: int) -> TuningPlan:
    """The plan for a group.

    Args:
        topology: The host.
        ranks: The number of ranks of the group.

    Example:
        >>> one_node = Topology((frozenset({0, 1}),), (frozenset({0}), frozenset({1})))
        >>> plan_for(one_node, 2).rounds
        'flat'
    """
    nodes = max(1, min(len(topology.nodes), ranks))
    per_node = -(-ranks // nodes)
    per_core = -(-ranks // max(1, len(topology.cores)))
    by_node = nodes > 1 and two_level_round_ns(nodes, per_node) < _CLEARLY * flat_round_ns(
        nodes, per_node
    )
    # Flat, all but a node's share of each reduction crosses; by node, only one rank's amount. A
    # single rank per node has nothing to save.
    crosses_less = nodes > 1 and per_node > 1
    crowded = ranks > topology.cpus
    # Two threads of a core share a cache. Ranks that take turns on a core share it, too, but each
    # rank finds there what it wrote in its own turn.
    shared = 1 if crowded else per_core
    return TuningPlan(
        nodes,
        per_node,
        "by node" if by_node else "flat",
        "by node" if crosses_less else "flat",
        shared,
        _align_down(topology.second_level_bytes // 2 // shared),
    )


def flat_round_ns(nodes: int, ranks_per_node: int) -> float:
    """The model's time of a round in which every rank looks at all others.

    Example:
        >>> flat_round_ns(1, 2) < flat_round_ns(1, 64) < flat_round_ns(4, 64)
        True
    """
    near, far = ranks_per_node - 1, (nodes - 1) * ranks_per_node
    last = FAR_NS if far else NEAR_NS
    return (near * NEAR_NS + far * FAR_NS) / AT_ONCE + last


def two_level_round_ns(nodes: int, ranks_per_node: int) -> float:
    """The model's time of a round through the first rank of each node.

    Example:
        >>> two_level_round_ns(4, 64) < flat_round_ns(4, 64)
        True
    """
    gather = (ranks_per_node - 1) * NEAR_NS / AT_ONCE + NEAR_NS
    between = (nodes - 1) * FAR_NS / AT_ONCE + FAR_NS
    release = NEAR_NS + ranks_per_node * READER_NS
    return gather + between + release


def _align_down(nbytes: int) -> int:
    return nbytes // 4096 * 4096
