"""Starting ranks: ``tilework run`` for scripts, :func:`spawn` and :func:`ranks` for programs."""

from typing import TYPE_CHECKING, NoReturn

from tilework.errors import RankFailedError
from tilework.from_torch import refuse_left_out
from tilework.launch.pool import RankPool, ranks
from tilework.launch.settings import LaunchSettings
from tilework.launch.spawn import RunningRanks, spawn

__all__ = ["LaunchSettings", "RankFailedError", "RankPool", "RunningRanks", "ranks", "spawn"]


if not TYPE_CHECKING:  # which would take any name for one that is here

    def __getattr__(name: str) -> NoReturn:
        """An error about a name that the package has not."""
        refuse_left_out(__name__, name)
