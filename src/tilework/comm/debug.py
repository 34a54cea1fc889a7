"""The level of the package's own messages: TORCH_DISTRIBUTED_DEBUG or TILEWORK_DEBUG."""

from __future__ import annotations

import enum
import logging
import os

logger = logging.getLogger("tilework")


class DebugLevel(enum.Enum):
    """The amount of log messages.

    OFF: nothing. INFO: groups made and ended. DETAIL: every operation as well.
    """

    OFF = "OFF"
    INFO = "INFO"
    DETAIL = "DETAIL"


# The level belongs to the process, not to a rank, as the logging configuration does.
_level = DebugLevel.OFF


def get_debug_level() -> DebugLevel:
    """The debug level of this process."""
    return _level


def set_debug_level(level: DebugLevel) -> None:
    """Set the debug level of this process; messages go to the logger ``tilework``.

    Example: ``set_debug_level(DebugLevel.DETAIL)``.
    """
    global _level
    _level = level
    if level is not DebugLevel.OFF:
        logger.setLevel(logging.INFO if level is DebugLevel.INFO else logging.DEBUG)


def set_debug_level_from_env() -> None:
    """Read the level from TILEWORK_DEBUG, else TORCH_DISTRIBUTED_DEBUG, in upper or lower case.

    Raises:
        ValueError: The variable holds a value other than OFF, INFO or DETAIL.

    Example: ``set_debug_level_from_env()`` after a change of ``os.environ``.
    """
    variable = "TILEWORK_DEBUG" if "TILEWORK_DEBUG" in os.environ else "TORCH_DISTRIBUTED_DEBUG"
    value = os.environ.get(variable, "OFF")
    try:
        set_debug_level(DebugLevel(value.upper()))
    except ValueError:
        raise ValueError(
            f"The value of {variable} must be OFF, INFO or DETAIL, got {value!r}"
        ) from None
