"""All ranks' plans at once: the bytes between each two ranks, as numbers and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from io import StringIO
from typing import TYPE_CHECKING

from tilework.layout.collective import Kind
from tilework.layout.cost import DEFAULT_COST, CostModel
from tilework.layout.planning import Plan, plan_of, transfers_between
from tilework.layout.tiling import Tiling

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

#: The maximum of edges in a table, which shows the heaviest.
MOST_ROWS = 20


@dataclass(frozen=True)
class AllRanksPlan:
    """The plans of all ranks, for display, tests and predictions; by :func:`plan_all_ranks`.

    ``print`` shows it as a line and a table, and rich draws it.
    """

    plans: tuple[Plan, ...]
    """The plans of the ranks given to :func:`plan_all_ranks`, in the same order."""
    cost: CostModel = field(default_factory=CostModel)
    """The cost model for predictions."""
    itemsize: int = 4
    """Bytes per element, for printing."""

    def edges(self, itemsize: int) -> dict[tuple[int, int], int]:
        """The bytes that each rank sends to each other, by (sender, receiver) in ascending order.

        Pairs of ranks that exchange nothing are left out.
        """
        return {edge: itemsize * volume for edge, volume in self._volumes.items()}

    def seconds(self, cost: CostModel | None = None, itemsize: int | None = None) -> float:
        """The predicted duration in seconds.

        The time of the busiest rank: all messages that it sends, one after the other, or all that
        it receives, whichever takes longer.
        """
        cost, itemsize = cost or self.cost, self.itemsize if itemsize is None else itemsize
        seconds: dict[tuple[str, int], float] = {}
        for (src, dst), nbytes in self.edges(itemsize).items():
            taken = cost.seconds(src, dst, nbytes)
            for end in (("sends", src), ("receives", dst)):
                seconds[end] = seconds.get(end, 0.0) + taken
        return max(seconds.values(), default=0.0)

    @property
    def kind(self) -> Kind:
        """The collective that is equivalent to the plans."""
        return self.plans[0].collective.kind if self.plans else "none"

    @cached_property
    def _volumes(self) -> dict[tuple[int, int], int]:
        volumes: Counter[tuple[int, int]] = Counter()
        for plan in self.plans:
            for piece in plan.sends:
                volumes[piece.src, piece.dst] += piece.box.volume
        return dict(sorted(volumes.items()))

    def __rich__(self) -> Group:
        from rich.console import Group

        return Group(self._summary(), *([self._table()] if self._volumes else []))

    def _table(self) -> Table:
        from rich.table import Table

        edges = self.edges(self.itemsize)
        table = Table()
        for name in ("from", "to", "bytes", "predicted"):
            table.add_column(name, justify="right")
        heaviest = sorted(edges, key=lambda edge: (-edges[edge], edge))[:MOST_ROWS]
        for src, dst in sorted(heaviest):
            nbytes = edges[src, dst]
            seconds = self.cost.seconds(src, dst, nbytes)
            table.add_row(str(src), str(dst), f"{nbytes:,}", f"{seconds * 1e6:,.1f} us")
        if rest := sorted(set(edges) - set(heaviest)):
            nbytes = sum(edges[edge] for edge in rest)
            table.add_row("…", f"{len(rest):,} more", f"{nbytes:,}", "")
        return table

    def _summary(self) -> str:
        edges = self.edges(self.itemsize)
        kept = self.itemsize * sum(p.box.volume for plan in self.plans for p in plan.keeps)
        return (
            f"{self.kind}: {sum(edges.values()):,} bytes between {len(self.plans):,} ranks, "
            f"{kept:,} copied in place, predicted {self.seconds() * 1e6:,.1f} us"
        )

    def __str__(self) -> str:
        from rich.console import Console

        text = StringIO()
        Console(file=text, width=100).print(self)
        return text.getvalue().rstrip("\n")


def plan_all_ranks(
    source: Tiling,
    target: Tiling,
    ranks: Iterable[int] | None = None,
    cost: CostModel | None = None,
    itemsize: int = 4,
) -> AllRanksPlan:
    """The plans of ``ranks`` (None: all that hold tiles before or afterwards).

    Args:
        source: The tiling before.
        target: The tiling afterwards.
        ranks: The global ranks whose plans are made.
        cost: As for :func:`plan`; also for predictions.
        itemsize: Bytes per element, for printing.

    Raises:
        ValueError: The shapes differ.
        NotImplementedError: The target is partial with a reduction without an identity element.

    Example:
        >>> from tilework.layout import Replicate, Shard, mesh_tiling
        >>> rows = mesh_tiling((4, 4), [0, 1], [Shard(0)])
        >>> everything = mesh_tiling((4, 4), [0, 1], [Replicate()])
        >>> print(plan_all_ranks(rows, everything))
        all_gather: ...
    """
    transfers = transfers_between(source, target, cost)
    if ranks is None:
        ranks = sorted({*source.ranks, *target.ranks})
    plans = tuple([plan_of(transfers, rank) for rank in ranks])
    return AllRanksPlan(plans, DEFAULT_COST if cost is None else cost, itemsize)


# The former names, kept for programs that use them.
WholePlan = AllRanksPlan
whole = plan_all_ranks
