"""Errors of the system in reading, writing or allocating memory, as errors of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tilework.errors import CheckpointError

#: torch's messages for a lack of memory, which raises a plain RuntimeError.
_NO_MEMORY = ("DefaultCPUAllocator", "can't allocate memory", "Storage size calculation overflowed")


def as_checkpoint_error(error: BaseException) -> CheckpointError | None:
    """The CheckpointError to raise for an OSError or a lack of memory; None for other errors."""
    if isinstance(error, CheckpointError):
        return error
    if isinstance(error, OSError):
        file = str(error.filename or "")
        where = f"{file}: " if file else ""
        return CheckpointError(f"{where}{error.strerror or error}", file=file)
    if isinstance(error, MemoryError) or _is_without_memory(error):
        reason = str(error).partition("\n")[0] or "the system gives no more"
        return CheckpointError(f"there is not enough memory: {reason}")
    return None


def _is_without_memory(error: BaseException) -> bool:
    """True for torch's out-of-memory errors, known by name or text, as torch may not be loaded."""
    if type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in _NO_MEMORY)


@contextmanager
def checkpoint_errors() -> Iterator[None]:
    """Turn an OSError or a lack of memory within into a CheckpointError. Also a decorator."""
    try:
        yield
    except Exception as error:
        told = as_checkpoint_error(error)
        if told is None or told is error:
            raise
        raise told from error
