"""Seeing: what all ranks do, on one timeline, with a judgement of who is waited for, and where."""

from tilework.inspect.format import TraceError
from tilework.inspect.judging import Late, Speed, Summary, summarize
from tilework.inspect.memory import MemoryByUse, Peak
from tilework.inspect.timeline import Timeline, read_timeline
from tilework.inspect.torch_hooks import count_steps
from tilework.inspect.traced_block import Seen, trace

__all__ = [
    "Late",
    "MemoryByUse",
    "Peak",
    "Seen",
    "Speed",
    "Summary",
    "Timeline",
    "TraceError",
    "count_steps",
    "read_timeline",
    "summarize",
    "trace",
]
