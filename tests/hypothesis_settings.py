"""How many examples hypothesis draws for a property that ranks run."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def examples(count: int) -> settings:
    """Ranks make the clock unreliable, and what was found once is pinned as a plain test."""
    return settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
