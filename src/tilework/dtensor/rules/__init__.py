"""The rules of torch's operators, by family."""

from tilework.dtensor.rules import elementwise, linear

__all__ = ["elementwise", "linear"]
