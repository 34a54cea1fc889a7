"""Helpers for tests of programs that use tilework, of stores, and of backends."""

from tilework.testing.ranks import run_ranks

__all__ = ["run_ranks"]
