"""Starting ranks: ``tilework run`` for scripts, :func:`spawn` and :func:`ranks` for programs."""

from typing import TYPE_CHECKING, NoReturn

from tilework.errors import RankFailedError
from tilework.from_torch import refuse_left_out
from tilework.launch.pool import RankPool, ranks
from tilework.launch.spawn import RunningRanks, spawn

__all__ = ["RankFailedError", "RankPool", "RunningRanks", "ranks", "spawn"]


if not TYPE_CHECKING:  # type checkers would take any name as defined

    def __getattr__(name: str) -> NoReturn:
        """Raise the error for ``name``, which this package lacks."""
        refuse_left_out(__name__, name)
