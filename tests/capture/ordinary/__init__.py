"""Ordinary training and inference programs, whose steps run as they are and captured.

``python -m tests.capture.ordinary`` runs all, or those that it is given the names of.
"""

from tests.capture.ordinary import arguments, between, models, optimizers, parallel, sizes
from tests.capture.ordinary.running import PROGRAMS, outcome

__all__ = [
    "PROGRAMS", "arguments", "between", "models", "optimizers", "outcome", "parallel", "sizes"
]  # fmt: skip
