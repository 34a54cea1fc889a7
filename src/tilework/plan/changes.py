"""The cheapest changes of a program whose memory does not suffice."""

from __future__ import annotations

from dataclasses import replace

from tilework.plan.report import Change, PlanReport

#: The most changes that are named.
_MOST = 3


def changes_for(report: PlanReport) -> PlanReport:
    """The report, with changes if memory does not suffice: the cheapest first."""
    if report.fits:
        return report
    peak = report.worst.peak.by_use()
    ranks = report.ranks
    share = (ranks - 1) / ranks
    states = peak["optimizer states"]
    shards = peak["parameters"] + peak["gradients"] + states
    found = [
        Change(
            "recompute activations in backward (apply_activation_checkpointing)",
            peak["activations"] // 2,
            "a second forward pass",
        ),
        Change(
            "shard optimizer states over all ranks (ZeroRedundancyOptimizer)",
            int(states * share),
            f"{2 * peak['parameters']:,} bytes a step",
        ),
        Change(
            "shard parameters, gradients and states over all ranks (fully_shard)",
            int(shards * share),
            f"{3 * peak['parameters']:,} bytes a step",
        ),
    ]
    useful = [change for change in found if change.saved > 0]
    return replace(report, changes=tuple(useful[:_MOST]))
