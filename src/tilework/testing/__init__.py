"""For tests of programs on tilework, and of stores and backends for it."""

from tilework.testing.ranks import run_ranks

__all__ = ["run_ranks"]
