"""Starting ranks: ``tilework run`` for scripts, :func:`spawn` for programs."""

from tilework.errors import RankFailedError
from tilework.launch.settings import LaunchSettings
from tilework.launch.spawn import RunningRanks, spawn

__all__ = ["LaunchSettings", "RankFailedError", "RunningRanks", "spawn"]
