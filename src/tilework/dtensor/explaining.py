"""What operators moved and why: ``explain()``, and the warning of what gathers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilework.dtensor.spec import DTensorSpec


def active() -> bool:
    """Whether somebody wants to know."""
    return False


def moved(name: str, source: DTensorSpec, target: DTensorSpec, dtype: torch.dtype) -> None:
    """An operator needs a tensor in another layout."""


def gathers(name: str, specs: Sequence[DTensorSpec], dtypes: Sequence[torch.dtype]) -> None:
    """An operator has no rule for such a call: it will gather its tensors."""
