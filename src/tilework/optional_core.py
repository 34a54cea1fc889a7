"""The core, the module in C++; None where it is not installed."""

try:
    from tilework import _core as core
except ImportError:
    core = None  # type: ignore[assignment]

__all__ = ["core"]
