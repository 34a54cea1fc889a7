"""Captured steps: a training or inference step recorded once, and run as one program."""

from tilework.capture.step import Program, capture

__all__ = ["Program", "capture"]
