"""Every rank's plan at once: who sends how much to whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from tilework.layout.cost import CostModel
from tilework.layout.planning import Plan, plan
from tilework.layout.tiling import Tiling


@dataclass(frozen=True)
class WholePlan:
    """The plans of all ranks, for tests, tables and costs; a rank that moves data needs its own."""

    plans: tuple[Plan, ...]

    def edges(self, itemsize: int) -> dict[tuple[int, int], int]:
        """The bytes that move, by (sender, receiver)."""
        volumes: Counter[tuple[int, int]] = Counter()
        for one in self.plans:
            for piece in one.sends:
                volumes[piece.src, piece.dst] += piece.box.volume
        return {edge: itemsize * volume for edge, volume in sorted(volumes.items())}

    def seconds(self, cost: CostModel, itemsize: int = 4) -> float:
        """The time of the busiest rank, sending or receiving one message after another."""
        busy: Counter[tuple[str, int]] = Counter()
        for (src, dst), nbytes in self.edges(itemsize).items():
            seconds = cost.seconds(src, dst, nbytes)
            busy["sends", src] += seconds  # type: ignore[assignment]
            busy["receives", dst] += seconds  # type: ignore[assignment]
        return max(busy.values(), default=0.0)


def whole(
    source: Tiling,
    target: Tiling,
    ranks: Iterable[int] | None = None,
    cost: CostModel | None = None,
) -> WholePlan:
    """The plans of ``ranks`` (None: all that hold anything before or after).

    Example:
        >>> from tilework.layout.placements import Replicate, Shard, mesh_tiling
        >>> rows = mesh_tiling((4, 4), [0, 1], [Shard(0)])
        >>> everything = mesh_tiling((4, 4), [0, 1], [Replicate()])
        >>> whole(rows, everything).edges(itemsize=4)
        {(0, 1): 32, (1, 0): 32}
    """
    if ranks is None:
        ranks = sorted({*source.ranks, *target.ranks})
    return WholePlan(tuple([plan(source, target, rank, cost) for rank in ranks]))
