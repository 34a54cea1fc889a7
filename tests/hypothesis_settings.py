"""How many examples hypothesis draws for a property that ranks run."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def examples(count: int) -> settings:
    """Those of the profile in tests/conftest.py, with the checks of health off: ranks take time."""
    return settings(max_examples=count, suppress_health_check=list(HealthCheck))
